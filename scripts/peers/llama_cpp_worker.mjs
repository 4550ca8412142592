// Answers requests with llama.cpp. Runs on Node with the node-llama-cpp that scripts/peers/setup.py installed, whose
// binaries choose the instructions of this CPU as they load; the protocol is that of decode/benchmark/peers.py.
//
//     node llama_cpp_worker.mjs --environment DIRECTORY --model FILE.gguf --threads N [--context TOKENS]

import {once} from "node:events";
import path from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";
import {parseArgs} from "node:util";

const {values: options} = parseArgs({
    options: {
        environment: {type: "string"},
        model: {type: "string"},
        threads: {type: "string"},
        context: {type: "string", default: "4096"},
    },
});
const library = path.resolve(options.environment, "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama} = await import(pathToFileURL(library).href);

async function reply(message) {
    if (!process.stdout.write(JSON.stringify(message) + "\n")) await once(process.stdout, "drain");
}

const threads = Number(options.threads);
const llama = await getLlama({
    gpu: false,
    build: "never",
    maxThreads: threads,
    logger: (level, message) => process.stderr.write(`${level}: ${message}\n`), // stdout is for replies alone
});
const model = await llama.loadModel({modelPath: options.model});
const context = await model.createContext({
    contextSize: Number(options.context),
    threads: {ideal: threads, min: threads},
});
const sequence = context.getSequence();

async function answer(request) {
    await sequence.clearHistory(); // no prefix of the request before is kept
    const ends = new Set(request.eos_token_ids);
    const sampling = {temperature: request.temperature, topK: 0, topP: 1, minP: 0, seed: request.seed};
    const tokens = [];
    for await (const token of sequence.evaluate(request.prompt_ids, {...sampling, yieldEogToken: true})) {
        tokens.push(token);
        if (ends.has(token) || tokens.length === request.max_new_tokens) break;
    }
    return {token_ids: tokens, forwards: tokens.length};
}

const versions = {"llama.cpp": llama.llamaCppRelease.release, node: process.version, system: llama.systemInfo.trim()};
await reply({ready: true, versions});
for await (const line of createInterface({input: process.stdin})) await reply(await answer(JSON.parse(line)));
await llama.dispose();
