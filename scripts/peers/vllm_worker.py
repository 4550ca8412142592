"""Answers requests with vLLM on a CPU, plainly or with n-gram speculation. Runs in the environment that
scripts/peers/setup.py made; the protocol is that of decode/benchmark/peers.py.

Everything runs in this one process. As a rule vLLM starts two more, a scheduler and a worker, which poll each other: on
a machine with as many cores as threads they take time from one another, and, while vLLM waits for its next request,
from the other methods of the benchmark. The model is compiled at the start (about a minute of one core the first time).
"""

import argparse
import json
import os
import sys
from pathlib import Path

STARTED = "MEDUSA_HEADS_PEER_STARTED"


def environment(threads: int) -> dict[str, str]:
    """What must be set before Python starts: vLLM's guide asks for Intel's OpenMP ahead of torch's own."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    preload = [str(openmp)] if openmp.exists() else []
    preload += filter(None, [os.environ.get("LD_PRELOAD")])
    return {
        **os.environ,
        STARTED: "1",
        "LD_PRELOAD": ":".join(preload),
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",  # ms that threads spin for more work: vLLM's own choice, and others get the cores after
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="transformers directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--ngram", type=int, default=0, metavar="TOKENS", help="speculated from the text so far")
    options = parser.parse_args()
    if STARTED not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(options.threads))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not come between the replies

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
        sampling = vllm.SamplingParams(  # without the request's seed: vLLM draws from the engine's
            temperature=request["temperature"],
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
