"""Answers requests with vLLM on a CPU, plainly or with n-gram speculation. Runs in the environment that
scripts/peers/setup.py made; the protocol is that of decode/benchmark/peers.py."""

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="transformers directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--ngram", type=int, default=0, metavar="TOKENS", help="speculated from the text so far")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not come between the replies
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

    import vllm  # type: ignore[import-not-found]

    speculation = {}
    if options.ngram:
        lookup = {"method": "ngram", "num_speculative_tokens": options.ngram}
        speculation["speculative_config"] = {**lookup, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    model = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=options.context,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **speculation,
    )
    print(json.dumps({"ready": True, "versions": {"vllm": vllm.__version__}}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["eos_token_ids"],
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["prompt_ids"]}
        tokens = list(model.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        forwards = None if options.ngram else len(tokens)
        print(json.dumps({"token_ids": tokens, "forwards": forwards}), file=replies, flush=True)


if __name__ == "__main__":
    main()
