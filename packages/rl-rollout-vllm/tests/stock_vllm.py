"""Run as a program: what unpatched vLLM, started on each directory, answers greedily.

Arguments: output file, prompts as JSON, directories. Imports nothing of this project.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["TORCHDYNAMO_DISABLE"] = "1"


def main():
    from vllm import LLM, SamplingParams

    output, prompts, *directories = sys.argv[1:]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False
    )
    answers = {}
    for directory in directories:
        llm = LLM(
            directory,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 26,
        )
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)],
            sampling,
            use_tqdm=False,
        )
        answers[directory] = [
            (
                list(item.outputs[0].token_ids),
                [entry[token].logprob for token, entry in zip(*_pair(item), strict=True)],
            )
            for item in results
        ]
        del llm
    Path(output).write_text(json.dumps(answers))


def _pair(item):
    return item.outputs[0].token_ids, item.outputs[0].logprobs


if __name__ == "__main__":
    main()
