# `make quickstart` and `make test` are the two entry points. Both set up the environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
RUN ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

# Bytecode is kept even where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup quickstart test soak soak-gpu check golden lock audit
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt nvidia-cutlass
	touch $@

# A byte-level model on the source text of this Python's standard library: minutes on two cores.
quickstart: setup
	$(BIN)/specc plan specs/gpt_mini.yaml
	$(BIN)/specc build specs/gpt_mini.yaml
	$(BIN)/specc train specs/gpt_mini.yaml --data stdlib --target cpu --run $(RUN)
	$(BIN)/specc quantize $(RUN) --max-tokens 65536
	$(BIN)/specc export $(RUN) --format artifact --out $(RUN)/gpt_mini.specc
	$(BIN)/specc size $(RUN)/gpt_mini.specc
	$(BIN)/specc eval $(RUN)/gpt_mini.specc --data stdlib --max-tokens 65536
	$(BIN)/specc generate $(RUN)/gpt_mini.specc --prompt 'def ' --max-tokens 200 --temperature 0.7 --seed 1
	@echo "the model is in $(RUN)/gpt_mini.specc"

# One process per core, each with one thread. GPU tests run one after the other, in one process.
test: check
	$(BIN)/python -m pytest -m 'not gpu and not soak' --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
	@if command -v nvidia-smi > /dev/null; then $(BIN)/python -m pytest -m gpu; else echo "no NVIDIA GPU here: GPU tests were not run"; fi

# The numbers of docs/promises.md, one promise after the other. It takes hours; a run that was stopped goes on where it
# was on the same day. SPECC_SOAK_SHARE=0.1 runs a tenth. The fuzzer is not in the environment: `pip install atheris`
# adds it, and without it that test is skipped, and has no result.
soak: setup
	$(BIN)/python -m pytest -m 'soak and not gpu' -p no:xdist --timeout 0
	$(BIN)/python docs/generate.py --write

# The same on a machine with an NVIDIA GPU, for the promises that need one. compute-sanitizer and nvcc are in the CUDA
# toolkit; tests that lack them are skipped, and have no result.
soak-gpu: setup
	$(BIN)/python -m pytest -m 'soak and gpu' -p no:xdist --timeout 0
	$(BIN)/python docs/generate.py --write

check: setup
	$(BIN)/ruff check .
	MYPYPATH=.types $(BIN)/mypy -p specc
	$(BIN)/specc build --all --check
	$(BIN)/specc schema --check
	$(BIN)/python docs/generate.py --check

# Writes everything that is generated and committed anew; review the diff.
golden: setup
	$(BIN)/specc build --all --force
	$(BIN)/specc schema --write
	SPECC_GOLDEN=1 $(BIN)/python -m pytest tests/errors tests/docs/test_docs.py tests/compiler/passes/test_passes_fuse.py
	$(BIN)/python docs/generate.py --write

# All packages with the hashes of their files, for `pip install --require-hashes -r requirements.lock`, and the bill of
# materials that lists them, docs/reference/sbom.cdx.json. Needs uv.
lock: setup
	uv pip compile pyproject.toml --extra train --extra dev --extra onnx --extra hub --extra parquet --extra bench \
		--universal --generate-hashes --constraint constraints.txt --python-version 3.11 --no-annotate --quiet \
		--custom-compile-command "make lock" --output-file requirements.lock
	$(BIN)/python docs/generate.py --write

# Known vulnerabilities of the locked packages. Needs uv, and a network where the index has the vulnerabilities.
audit:
	uvx pip-audit --require-hashes --disable-pip --requirement requirements.lock
