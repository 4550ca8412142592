"""Answers requests with llama.cpp. Runs in the environment that scripts/peers/setup.py made, which has llama-cpp-python
and nothing of this project; the protocol is that of decode/benchmark/peers.py."""

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not come between the replies

    import llama_cpp  # type: ignore[import-not-found]

    model = llama_cpp.Llama(
        options.model,
        n_ctx=options.context,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
    print(
        json.dumps({"ready": True, "versions": {"llama-cpp-python": llama_cpp.__version__}}), file=replies, flush=True
    )
    for line in sys.stdin:
        request = json.loads(line)
        model.reset()  # no prefix of the request before is kept
        model.set_seed(request["seed"])
        ends, tokens = set(request["eos_token_ids"]), []
        sampling = {"temp": request["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in model.generate(request["prompt_ids"], **sampling):
            tokens.append(token)
            if token in ends or len(tokens) == request["max_new_tokens"]:
                break
        print(json.dumps({"token_ids": tokens, "forwards": len(tokens)}), file=replies, flush=True)


if __name__ == "__main__":
    main()
