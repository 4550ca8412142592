"""The workers themselves, on libraries of a few lines that stand in for llama.cpp and vLLM."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from decode.benchmark.methods import Request
from decode.benchmark.peers import WORKERS, Peer

EOS = 2
LLAMA = """
let sequence = {history: [], cleared: 0};
class Sequence {
    async clearHistory() { sequence.history = []; sequence.cleared += 1; }
    async *evaluate(tokens, options) {
        if (sequence.history.length) throw new Error("a prefix was kept");
        if (!options.yieldEogToken || options.topK !== 0 || options.topP !== 1 || options.minP !== 0)
            throw new Error(JSON.stringify(options));
        sequence.history.push(...tokens);
        let token = tokens.at(-1);
        while (true) { token -= 1; sequence.history.push(token); yield options.temperature > 0 ? options.seed : token; }
    }
}
export async function getLlama(options) {
    options.logger("info", "said on the way");
    if (options.gpu !== false || options.build !== "never") throw new Error("the CPU's binaries, and none are built");
    return {
        llamaCppRelease: {release: "v0"},
        systemInfo: `threads ${options.maxThreads} `,
        loadModel: async ({modelPath}) => ({
            createContext: async ({contextSize, threads}) => {
                if (modelPath !== "base.gguf" || contextSize !== 4096 || threads.min !== 3) throw new Error("options");
                return {getSequence: () => new Sequence()};
            },
        }),
        dispose: async () => {},
    };
}
"""
VLLM = """
import os
from types import SimpleNamespace
__version__ = "0"
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, stop_token_ids, detokenize):  # takes no seed
        self.max_tokens, self.ends = max_tokens, stop_token_ids
class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, enable_prefix_caching, speculative_config=None):
        print("said on the way")
        assert not enable_prefix_caching and max_num_seqs == 1
        assert os.environ["OMP_NUM_THREADS"] == "3" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        if speculative_config is not None:
            assert speculative_config["method"] == "ngram" and speculative_config["num_speculative_tokens"] == 5
    def generate(self, prompts, sampling, use_tqdm):
        token, tokens = prompts[0]["prompt_token_ids"][-1], []
        while len(tokens) < sampling.max_tokens and (not tokens or tokens[-1] not in sampling.ends):
            token -= 1
            tokens.append(token)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens))])]
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_llama_cpp_counts_down_to_eos_and_keeps_nothing_between_requests(tmp_path: Path) -> None:
    library = tmp_path / "node_modules" / "node-llama-cpp"
    (library / "dist").mkdir(parents=True)
    (library / "package.json").write_text(json.dumps({"type": "module"}))
    (library / "dist" / "index.js").write_text(LLAMA)
    command = ["node", str(WORKERS / "llama_cpp_worker.mjs"), "--environment", str(tmp_path)]
    with Peer("llama.cpp", [*command, "--model", "base.gguf", "--threads", "3"], (EOS,)) as peer:
        assert peer.versions["llama.cpp"] == "v0" and peer.versions["system"] == "threads 3"
        for _ in range(2):
            answer = peer(Request([9, 5], 64, 0.0, 0))
            assert answer.token_ids == [4, 3, EOS] and answer.forwards == 3
        assert peer(Request([9], 4, 0.0, 0)).token_ids == [8, 7, 6, 5]
        assert peer(Request([9], 3, 0.7, 11)).token_ids == [11, 11, 11]  # seeded sampling
        process = peer._process
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="vLLM has no build for Windows")
@pytest.mark.parametrize("ngram", (0, 5))
def test_vllm_is_started_in_one_process_and_sent_no_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ngram: int
) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(WORKERS / "vllm_worker.py"), "--model", "base", "--threads", "3"]
    with Peer("vllm", [*command, "--ngram", str(ngram)], (EOS,)) as peer:
        assert peer.versions == {"vllm": "0"}
        answer = peer(Request([9, 5], 64, 0.0, 7))
        assert answer.token_ids == [4, 3, EOS] and answer.forwards == (None if ngram else 3)
        assert peer(Request([9], 4, 0.5, 7)).token_ids == [8, 7, 6, 5]
