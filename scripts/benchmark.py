"""Ways of decoding side by side: this engine plain and with heads, transformers' own `generate`, other programs.

    python scripts/benchmark.py --prompts spec_bench.jsonl --output results/cpu-bf16
    python scripts/peers/setup.py --directory PEERS
    python scripts/benchmark.py --peers llama.cpp vllm vllm-ngram --peer-directory PEERS --prompts … --output …

All methods answer the same prompts, one prompt after the other and in turn within it, on one clock (wall time of the
call, reading the prompt included) and one counter (new tokens, the EOS token included), after a warm-up outside. The
output directory gets rows.jsonl (every measurement as it is made: a run that was cut continues where it stopped),
result.json, result.md and pictures. With --check-identity every greedy text is checked against the base's own choice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

METHODS = ("plain", "heads", "generate", "prompt_lookup")
SLOW = ("generate", "prompt_lookup")
PEERS = ("llama.cpp", "vllm", "vllm-ngram")
WARM_UP_TOKENS = 8


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL rows {question_id, category, turns}")
    parser.add_argument("--output", type=Path, required=True, help="directory of the run; an existing one is continued")
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument(
        "--heads",
        nargs="+",
        metavar="[LABEL=]NAME",
        default=["smollm2-135m"],
        help="heads of any family, or whatever --drafter of medusa-decode takes",
    )
    parser.add_argument("--tree", type=Path, help="JSON file with parents and ranks; default as in decoding")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--no-guard", action="store_true", help="heads draft also where it does not pay")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[], help="other programs, asked the same")
    parser.add_argument("--peer-directory", type=Path, help="what scripts/peers/setup.py has made")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--compile", action="store_true", help="compile the base of plain and heads")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="so many prompts, each category keeping its share")
    parser.add_argument("--per-category", type=int, help="at most so many prompts of each category")
    parser.add_argument("--slow-limit", type=int, help=f"so many of those prompts for {' and '.join(SLOW)}")
    parser.add_argument(
        "--check-identity",
        action="store_true",
        help="is greedy text the base's own? (with --methods heads plain decoding is left out)",
    )
    parser.add_argument("--costs", type=Path, help="JSON of scripts/measure_cost.py, to draw beside the results")
    parser.add_argument("--report-only", action="store_true", help="figures of what rows.jsonl has, nothing is run")
    parser.add_argument("--no-figures", action="store_true")
    options = parser.parse_args(given)
    for name in ("tree", "costs"):
        file = getattr(options, name)
        if file is not None and not file.is_file():
            parser.error(f"--{name}: no file {file}")
    if options.peers and options.peer_directory is None:
        parser.error("--peers needs --peer-directory, which scripts/peers/setup.py makes")
    if options.check_identity:
        options.methods = [name for name in ("plain", "heads") if name in options.methods]
        if "heads" not in options.methods:
            parser.error("--check-identity checks what heads write: --methods must name them")
        options.temperatures = [0.0]
        options.peers = []
    return options


def named_heads(names: Sequence[str]) -> dict[str, str]:
    """Label → heads. One without a label is called `heads`, several by their last part."""
    from medusa_heads.errors import ConfigError

    found: dict[str, str] = {}
    for name in names:
        label, separator, rest = name.partition("=")
        if not separator:
            label, rest = "heads" if len(names) == 1 else Path(name).name, name
        if label in found or label in METHODS[:1] + SLOW + PEERS:
            raise ConfigError(f"the label {label!r} is taken; name heads as LABEL=NAME")
        found[label] = rest
    return found


def chosen_prompts(options: argparse.Namespace) -> tuple[list[Any], set[str]]:
    """The prompts in the order of asking, and the ids that slow methods are asked too."""
    from decode.benchmark.prompts import per_category, read_prompts, shuffled, stratified

    prompts = read_prompts(options.prompts)
    if options.per_category is not None:
        prompts = per_category(prompts, options.per_category)
    if options.limit is not None:
        prompts = stratified(prompts, options.limit)
    slow = prompts if options.slow_limit is None else stratified(prompts, options.slow_limit)
    return shuffled(prompts, options.seed), {prompt.id for prompt in slow}


def configuration(options: argparse.Namespace, heads: dict[str, str]) -> dict[str, Any]:
    """What must be the same for measurements to belong together."""
    from decode.benchmark.drafting import weights_digest
    from decode.benchmark.prompts import file_hash

    asked = heads if "heads" in options.methods else {}
    return {
        "base": options.base,
        "heads": asked,
        "heads_hash": {label: weights_digest(name) for label, name in asked.items()},
        "tree": None if options.tree is None else json.loads(options.tree.read_text()),
        "methods": options.methods,
        "prompts": options.prompts.name,
        "prompts_sha256": file_hash(options.prompts),
        "turn": "first",
        "limit": options.limit,
        "per_category": options.per_category,
        "slow_limit": options.slow_limit,
        "dtype": options.dtype,
        "temperatures": options.temperatures,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "batch_size": 1,
        "check_identity": options.check_identity,
        "device": options.device,
        "threads": options.threads,
        # Named where they are used, so that runs from before they were there can be continued.
        **({"peers": options.peers} if options.peers else {}),
        **({"guard": False} if options.no_guard else {}),
        **({"compile": True} if options.compile else {}),
    }


def build_methods(
    options: argparse.Namespace, heads: dict[str, str]
) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The packed base, the unpacked one where a method or the check needs it, the methods by name, the heads' trees."""
    from decode.benchmark.drafting import trees_of
    from decode.benchmark.methods import engine_method, generate_method, untouched_base
    from decode.drafters import load_drafter
    from decode.engine import Decoder
    from decode.guard import DEFAULT_GUARD
    from decode.tree import Tree
    from medusa_heads.base import Base

    base = Base.load(options.base, dtype=options.dtype, device=options.device, compile=options.compile)
    methods: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    if "plain" in options.methods:
        methods["plain"] = engine_method(Decoder(base))
    if "heads" in options.methods:
        given: dict[str, Any] = (
            {} if options.tree is None else {"tree": Tree.from_dict(json.loads(options.tree.read_text()))}
        )
        guard = None if options.no_guard else DEFAULT_GUARD
        for label, name in heads.items():
            drafter = load_drafter(name, base, **given)
            methods[label], trees[label] = engine_method(Decoder(base, drafter, guard=guard)), trees_of(drafter)
    untouched = None
    if options.check_identity or set(SLOW) & set(options.methods):
        untouched = untouched_base(options.base, options.dtype, options.device)
    for name in SLOW:
        if name in options.methods:
            assert untouched is not None
            methods[name] = generate_method(untouched, prompt_lookup=name == "prompt_lookup")
    return base, untouched, methods, trees


def start_peers(options: argparse.Namespace, base: Any, running: ExitStack) -> dict[str, Any]:
    """The other programs, loaded and waiting; they end with `running`."""
    import torch

    from decode.benchmark.peers import Peer, peer_command

    threads, dtype = torch.get_num_threads(), options.dtype
    commands = {
        name: peer_command(name, options.peer_directory, options.base, threads, dtype) for name in options.peers
    }
    return {name: running.enter_context(Peer(name, command, base.eos_token_ids)) for name, command in commands.items()}


def measure(
    options: argparse.Namespace,
    log: Any,
    heads: dict[str, str],
    prompts: list[Any],
    slow: set[str],
    running: ExitStack,
) -> None:
    """Asks what has not been asked yet, and writes each answer down."""
    import torch

    from decode.benchmark.methods import Request, timed
    from decode.cli.common import quiet_transformers
    from decode.machine import describe_machine, load_average, versions
    from medusa_heads.errors import ConfigError

    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    done = {(row["kind"], row["id"], row.get("method"), row.get("temperature")) for row in log.rows}
    base, untouched, methods, trees = build_methods(options, heads)
    peers = start_peers(options, base, running)
    methods |= peers
    labels = list(methods)
    if log.sessions and log.sessions[0]["trees"] != trees:
        raise ConfigError("the heads' trees are not those that the run began with (tuned since?): give --tree")
    session: dict[str, Any] = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    session |= {"machine": describe_machine(base.device), "load_average": load_average(), "trees": trees}
    if peers:
        session["peers"] = {name: peer.versions for name, peer in peers.items()}
    log.add_session(session)

    def ask(label: str, prompt: Any, temperature: float, count: int) -> tuple[Any, float]:
        ids = base.render_chat([{"role": "user", "content": prompt.text}])
        return timed(methods[label], Request(ids, count, temperature, options.seed), base.device)

    shortest = min(prompts, key=lambda prompt: len(prompt.text))
    for label in labels:
        for temperature in options.temperatures:
            ask(label, shortest, temperature, WARM_UP_TOKENS)
    begin, measured = time.monotonic(), 0
    for place, prompt in enumerate(prompts):
        answers: dict[str, Any] = {}
        tasks = [(label, t) for t in options.temperatures for label in labels if label not in SLOW or prompt.id in slow]
        for label, temperature in tasks[place % len(tasks) :] + tasks[: place % len(tasks)]:
            again = options.check_identity and any(("identity", prompt.id, name, None) not in done for name in heads)
            if ("answer", prompt.id, label, temperature) in done and not again:
                continue
            answer, seconds = ask(label, prompt, temperature, options.max_new_tokens)
            answers[label] = answer
            measured += 1
            if ("answer", prompt.id, label, temperature) not in done:
                log.add(answer_row(prompt, label, temperature, answer, seconds, load_average()))
        if options.check_identity and answers:
            unchecked = [name for name in heads if ("identity", prompt.id, name, None) not in done]
            check_identity(log, base, untouched, prompt, answers, unchecked)
        if measured:
            say_progress(place + 1, len(prompts), time.monotonic() - begin)


def answer_row(
    prompt: Any, label: str, temperature: float, answer: Any, seconds: float, load: float | None
) -> dict[str, Any]:
    return {
        "kind": "answer",
        "method": label,
        "temperature": temperature,
        "id": prompt.id,
        "category": prompt.category,
        "new_tokens": len(answer.token_ids),
        "seconds": round(seconds, 6),
        "forwards": answer.forwards,
        "histogram": answer.histogram,
        "stages": {stage: round(value, 6) for stage, value in answer.stages.items()},
        "digest": hashlib.sha256(repr(answer.token_ids).encode()).hexdigest()[:16],
        "load_average": load,
    }


def check_identity(
    log: Any, base: Any, untouched: Any, prompt: Any, answers: dict[str, Any], labels: Sequence[str]
) -> None:
    from decode.benchmark.identity import check

    ids = base.render_chat([{"role": "user", "content": prompt.text}])
    plain = answers["plain"].token_ids if "plain" in answers else None
    for label in labels:
        verdict = check(untouched, ids, plain, answers[label].token_ids)
        found = {"kind": "identity", "id": prompt.id, "method": label, "new_tokens": len(answers[label].token_ids)}
        log.add(found | verdict)


def say_progress(done: int, total: int, seconds: float) -> None:
    print(f"{done}/{total} prompts, {seconds / 60:.1f} min in this session", file=sys.stderr, flush=True)


def report(options: argparse.Namespace, log: Any, prompts: list[Any], slow: set[str]) -> dict[str, Any]:
    """Writes result.json, result.md and the pictures."""
    from decode.benchmark.figures import draw_all
    from decode.benchmark.summary import markdown, summarize
    from decode.measure import Costs

    own = [method for method in log.config["methods"] if method != "heads"]
    labels = [*log.config["heads"], *own, *log.config.get("peers", ())]
    expected = sum(len(slow if label in SLOW else prompts) for label in labels) * len(options.temperatures)
    found = sum(row["kind"] == "answer" for row in log.rows)
    costs = None if options.costs is None else json.loads(options.costs.read_text())
    result = {
        "config": log.config,
        "complete": found == expected,
        "answers": found,
        "subsets": {"all methods": len(prompts), ", ".join(SLOW): len(slow)},
        "sessions": log.sessions,
        **summarize(log.rows),
    }
    if costs is not None:
        result["costs"] = costs
    (options.output / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (options.output / "result.md").write_text(markdown(result) + "\n")
    if not options.no_figures:
        draw_all(result, None if costs is None else Costs.from_dict(costs["costs"]), options.output)
    return result


def main(given: Sequence[str] | None = None) -> int:
    from decode.benchmark.log import Log
    from decode.benchmark.summary import markdown
    from medusa_heads.errors import UserError

    options = arguments(given)
    try:
        heads = named_heads(options.heads)
        prompts, slow = chosen_prompts(options)
        log = Log(options.output / "rows.jsonl", configuration(options, heads))
        if not options.report_only:
            with ExitStack() as running:
                measure(options, log, heads, prompts, slow, running)
        result = report(options, log, prompts, slow)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(result))
    if options.dtype != "float32":
        return 0
    return 0 if all(is_the_bases_own(found) for found in result.get("identity", {}).values()) else 1


def is_the_bases_own(found: dict[str, Any]) -> bool:
    same = found["same_as_plain"] == found["compared_with_plain"]
    return same and found["base_argmax_everywhere"] == found["prompts"]


if __name__ == "__main__":
    sys.exit(main())
