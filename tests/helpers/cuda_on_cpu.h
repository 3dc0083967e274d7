// What the kernels of softmax_loss_cuda use of CUDA, on the CPU: a thread each thread, one block after another. Copies
// to shared memory come as late as they may: cp.async's when their group is waited for, TMA's on a thread of their own.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <math.h>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

inline void check(bool holds, char const* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct dim3 { unsigned x, y = 1, z = 1; dim3(unsigned x = 1) : x(x) {} };

inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    uint32_t const word = __float_as_uint(x);
    bits = x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }

// A block: who a thread is, and where threads meet.
constexpr size_t kMost = 256 << 10;
alignas(128) inline unsigned char memory[kMost];  // dynamic shared memory
inline size_t given = 0;  // bytes of it
inline thread_local dim3 threadIdx, blockIdx;
inline dim3 gridDim;
struct Warp { std::barrier<> meet{32}; float values[32]; };
struct Block {
  std::barrier<> all;
  std::vector<std::unique_ptr<Warp>> warps;
  std::mutex lock;
  std::map<int, std::unique_ptr<std::barrier<>>> named;
  explicit Block(unsigned threads) : all(threads) {
    for (unsigned i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
  }
};
inline Block* block;
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __syncwarp() { block->warps[threadIdx.x / 32]->meet.arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  Warp& warp = *block->warps[threadIdx.x / 32];
  unsigned const lane = threadIdx.x % 32;
  warp.values[lane] = value;
  warp.meet.arrive_and_wait();
  float const other = warp.values[lane ^ lanes];
  warp.meet.arrive_and_wait();
  return other;
}
inline void ptx_bar_sync(int threads) {
  std::barrier<>* met;
  {
    std::lock_guard const held(block->lock);
    auto& found = block->named[threads];
    if (!found) found = std::make_unique<std::barrier<>>(threads);
    met = found.get();
  }
  met->arrive_and_wait();
}
inline void __stcs(uint4* to, uint4 value) {
  check(reinterpret_cast<uintptr_t>(to) % 16 == 0, "a store is not aligned");
  *to = value;
}
inline void ptx_ex2_approx(float& y, float x) { y = exp2f(x); }
inline void ptx_createpolicy_fractional(uint64_t& policy) { policy = 0; }

// Addresses in shared memory have 32 bits.
inline size_t __cvta_generic_to_shared(void const* at) { return static_cast<unsigned char const*>(at) - memory; }
inline unsigned char* shared(uint32_t at) { return memory + static_cast<int32_t>(at); }
inline void copied(uint32_t to, void const* from, size_t bytes) {
  check(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0, "a copy is not aligned");
  check(to + bytes <= given, "a copy leaves shared memory");
  std::memcpy(shared(to), from, bytes);
}

// cp.async: groups of copies that the thread has committed.
using Copy = std::pair<uint32_t, void const*>;
inline thread_local std::vector<Copy> begun;
inline thread_local std::deque<std::vector<Copy>> groups;
inline void ptx_cp_async_cg(uint32_t to, void const* from, uint64_t) { begun.emplace_back(to, from); }
inline void ptx_cp_async_commit_group() { groups.push_back(std::exchange(begun, {})); }
inline void ptx_cp_async_wait_group(size_t left) {
  for (; groups.size() > left; groups.pop_front()) {
    for (auto const& [to, from] : groups.front()) copied(to, from, 16);
  }
}

// mbarrier, and the copies that arrive at one.
struct Barrier { int count = 0, pending = 0, bytes = 0; uint32_t phase = 0; };
inline std::mutex barrier_lock;
inline std::condition_variable changed;
inline std::map<uint32_t, Barrier> barriers_by_address;
inline void settle(Barrier& one) {
  check(one.pending >= 0, "more threads arrive at a barrier than it counts");
  if (one.pending || one.bytes) return;
  one.pending = one.count;
  one.phase ^= 1;
  changed.notify_all();
}
inline void ptx_mbarrier_init(uint32_t at, int count = 1) {
  std::lock_guard const held(barrier_lock);
  check(at % 8 == 0, "a barrier is not aligned");
  barriers_by_address[at] = {count, count, 0, 0};
}
inline void ptx_fence(...) {}
inline void ptx_mbarrier_arrive(uint32_t at, uint32_t bytes = 0) {
  std::lock_guard const held(barrier_lock);
  Barrier& one = barriers_by_address.at(at);
  one.bytes += bytes;
  --one.pending;
  settle(one);
}
inline void ptx_mbarrier_try_wait(uint32_t& over, uint32_t at, uint32_t phase) {
  std::unique_lock held(barrier_lock);
  auto const& one = barriers_by_address.at(at);
  over = changed.wait_for(held, std::chrono::milliseconds(5), [&] { return one.phase != phase; });
}
struct Bulk { uint32_t to; void const* from; uint32_t bytes, barrier; };
inline std::deque<Bulk> bulks;
inline bool ended = false;
inline void ptx_cp_async_bulk(uint32_t to, void const* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  std::lock_guard const held(barrier_lock);
  bulks.push_back({to, from, bytes, barrier});
  changed.notify_all();
}
inline void engine() {  // what TMA does
  std::unique_lock held(barrier_lock);
  while (true) {
    changed.wait(held, [] { return ended || !bulks.empty(); });
    if (bulks.empty()) return;
    Bulk const one = bulks.front();
    bulks.pop_front();
    held.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    copied(one.to, one.from, one.bytes);
    held.lock();
    Barrier& met = barriers_by_address.at(one.barrier);
    met.bytes -= one.bytes;
    settle(met);
  }
}

// The runtime: a GPU of three multiprocessors.
using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess, cudaDevAttrMultiProcessorCount };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared = 100 };
inline char const* cudaGetErrorString(cudaError_t) { return "no error"; }
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaDeviceGetAttribute(int* value, int, int) { *value = 3; return 0; }
template <class F>
int cudaFuncSetAttribute(F*, int, int) { return 0; }
template <class... A, size_t... I>
void run(void (*kernel)(A...), void** given, std::index_sequence<I...>) { kernel(*static_cast<A*>(given[I])...); }
template <class... A>
int cudaLaunchKernel(void (*kernel)(A...), dim3 blocks, dim3 threads, void** arguments, size_t bytes, cudaStream_t) {
  check(bytes <= kMost, "too much shared memory");
  given = bytes;
  gridDim = blocks;
  for (unsigned at = 0; at < blocks.x; ++at) {
    std::memset(memory, 0xff, kMost);  // NaN
    Block mine(threads.x);
    block = &mine;
    ended = false;
    std::thread tma(engine);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads.x; ++i) {
      running.emplace_back([=] {
        threadIdx = dim3(i), blockIdx = dim3(at);
        run(kernel, arguments, std::index_sequence_for<A...>{});
      });
    }
    for (auto& thread : running) thread.join();
    {
      std::lock_guard const held(barrier_lock);
      check(bulks.empty(), "a copy outlives its block");
      ended = true;
      changed.notify_all();
    }
    tma.join();
    for (auto const& [address, one] : barriers_by_address) check(one.bytes == 0, "a barrier waits for bytes");
    barriers_by_address.clear();
  }
  return 0;
}
