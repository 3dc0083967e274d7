"""Every family of decoders that is compared with `transformers`."""

import families_of_deepseek
import families_of_gpt
import families_of_llama

FAMILIES = {**families_of_llama.FAMILIES, **families_of_gpt.FAMILIES, **families_of_deepseek.FAMILIES}
