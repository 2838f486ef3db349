// A rollout job for Vime in JavaScript, without dependencies and without an engine: it shows the protocol, not a policy.
//
//   VIME_TOKEN=... node producer.mjs http://HOST:PORT --model DIR      (DIR: tokenizer.json of the run's model)
//
// Its policy answers with one letter, each of LETTERS with the same probability, and then ends. That is another policy
// than the run's, which its log-probabilities say honestly: ln(1/n) for the letter and 0 for the end. The trainer
// corrects for that as far as its own settings say; do not expect it to learn fast. See docs/producer-protocol.md.

import { createHash, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

const { values: args, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    token: { type: "string", default: process.env.VIME_TOKEN ?? "" },
    model: { type: "string" },
    letters: { type: "string", default: "abcdefgh" },
  },
});
const ADDRESS = positionals[0] ?? process.env.VIME_GATEWAY;
const AWAY_MS = 300_000; // the job ends when the gateway has not responded at all for so long
const GONE = ["lease_lost", "unknown_lease", "unknown_version", "unknown_file"];
const VOCABULARY = JSON.parse(readFileSync(`${args.model}/tokenizer.json`, "utf8")).model.vocab;
const END = VOCABULARY["<eos>"];
const LETTERS = [...args.letters].filter((letter) => letter in VOCABULARY);

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
let loaded = null; // the last report of weights: a gateway that was started again asks for it

class Gone extends Error {} // the lease or the weights that a call is about, or a file of them arrived broken

/** Return the message of the response, or the bytes of a file with that `sha256`. A call is sent until its response
 * arrives: it may be repeated as it was, and counts once. */
async function call(method, path, body, { sha256 = "", awayMs = AWAY_MS } = {}) {
  let responded = Date.now();
  for (;;) {
    let waitS = 1;
    try {
      const response = await fetch(ADDRESS + path, {
        method,
        headers: { authorization: `Bearer ${args.token}`, "content-type": "application/json" },
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.timeout(60_000),
      });
      const content = Buffer.from(await response.arrayBuffer());
      if (response.status === 200 && sha256) {
        if (createHash("sha256").update(content).digest("hex") === sha256) return content;
        throw new Gone("other bytes than the manifest says");
      }
      const message = JSON.parse(content); // fails when a proxy responded, not the gateway
      if (message === null || typeof message !== "object" || Array.isArray(message)) throw new Error("no message");
      if (response.status === 200) return message;
      const error = message;
      if (typeof error.code !== "string" || typeof error.may_repeat !== "boolean") throw new Error("not of the gateway");
      responded = Date.now();
      waitS = Number(response.headers.get("retry-after") ?? 1);
      if (GONE.includes(error.code)) throw new Gone(error.code);
      if (error.code === "unconfirmed_version") await call("POST", "/v1/weights/loaded", loaded);
      else if (!error.may_repeat) {
        console.error(error);
        process.exit(1);
      }
    } catch (failure) {
      if (failure instanceof Gone) throw failure;
      if (Date.now() - responded > awayMs) {
        console.error(`${method} ${path}: no response within ${awayMs} ms: ${failure}`);
        process.exit(1);
      }
    }
    await sleep(waitS * 1000);
  }
}

/** Read the weights of the serving version, compute their hash from the bytes, and report it. Returns the version. */
async function load() {
  const manifest = await call("GET", "/v1/weights/serving");
  const files = {};
  for (const { name, sha256 } of manifest.files) {
    files[name] = await call("GET", `/v1/weights/${manifest.version}/files/${name}`, undefined, { sha256 });
  }
  const digest = new Blake2b(16);
  for (const { name, dtype, shape, file } of JSON.parse(files["tensors.json"]).tensors) {
    const header = Buffer.from(`${name}\n${dtype}\n${shape.join(",")}\n`);
    const length = Buffer.alloc(4);
    length.writeUInt32LE(header.length);
    digest.update(length).update(header).update(tensorBytes(files[file], name));
  }
  loaded = { version: manifest.version, engines: { javascript: digest.hex() } };
  await call("POST", "/v1/weights/loaded", loaded);
  return manifest.version;
}

/** A safetensors file: 8 bytes length of the header, the header as JSON, and the data that its offsets point into. */
function tensorBytes(file, name) {
  const start = 8 + Number(file.readBigUInt64LE(0));
  const [from, to] = JSON.parse(file.subarray(8, start))[name].data_offsets;
  return file.subarray(start + from, start + to);
}

function sampleOf(prompt, index, version) {
  const letter = LETTERS[Math.floor(Math.random() * LETTERS.length)];
  return {
    index,
    tokens: [...prompt.tokens, VOCABULARY[letter], END],
    response_length: 2,
    log_probs: [-Math.log(LETTERS.length), 0],
    versions: [[0, 2, version]],
    reward: letter === String(prompt.label).trim() ? 1 : 0,
    response: letter,
  };
}

/** BLAKE2b (RFC 7693) with any length of the digest: node's own has 64 bytes only. */
class Blake2b {
  static IV = [
    0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
    0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
  ].flatMap((word) => [Number(word & 0xffffffffn), Number(word >> 32n)]);
  static SIGMA = [
    "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
    "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
  ].map((row) => [...row].map((digit) => parseInt(digit, 16)));

  constructor(size) {
    this.size = size;
    this.state = Uint32Array.from(Blake2b.IV); // 8 words of 64 bits, each as its low and its high half
    this.state[0] ^= 0x01010000 ^ size;
    this.block = Buffer.alloc(128);
    this.filled = 0;
    this.total = 0;
  }

  update(data) {
    for (let place = 0; place < data.length; ) {
      if (this.filled === 128) this.compress(false); // the last block is compressed by `hex`
      const taken = Math.min(128 - this.filled, data.length - place);
      data.copy(this.block, this.filled, place, place + taken);
      [this.filled, this.total, place] = [this.filled + taken, this.total + taken, place + taken];
    }
    return this;
  }

  hex() {
    this.block.fill(0, this.filled);
    this.compress(true);
    return Buffer.from(this.state.buffer, 0, this.size).toString("hex");
  }

  compress(isLast) {
    const v = new Uint32Array(32);
    v.set(this.state);
    v.set(Blake2b.IV, 16);
    v[24] ^= this.total >>> 0;
    v[25] ^= Math.floor(this.total / 2 ** 32);
    if (isLast) [v[28], v[29]] = [~v[28], ~v[29]];
    const words = new Uint32Array(this.block.buffer, this.block.byteOffset, 32);
    const add = (a, low, high) => {
      const sum = v[a] + low;
      v[a + 1] += high + (sum > 0xffffffff ? 1 : 0);
      v[a] = sum;
    };
    const turn = (a, b, by) => {
      // v[a] = (v[a] ^ v[b]) rotated to the right by `by` bits
      let [low, high] = [v[a] ^ v[b], v[a + 1] ^ v[b + 1]];
      if (by >= 32) [low, high, by] = [high, low, by - 32];
      v[a] = by ? (low >>> by) | (high << (32 - by)) : low;
      v[a + 1] = by ? (high >>> by) | (low << (32 - by)) : high;
    };
    const mix = (a, b, c, d, x, y) => {
      for (const [word, first, second] of [[x, 32, 24], [y, 16, 63]]) {
        add(a, v[b], v[b + 1]);
        add(a, words[2 * word], words[2 * word + 1]);
        turn(d, a, first);
        add(c, v[d], v[d + 1]);
        turn(b, c, second);
      }
    };
    for (let round = 0; round < 12; round++) {
      const s = Blake2b.SIGMA[round % 10];
      for (let i = 0; i < 4; i++) mix(2 * i, 8 + 2 * i, 16 + 2 * i, 24 + 2 * i, s[2 * i], s[2 * i + 1]);
      for (let i = 0; i < 4; i++) {
        const [b, c, d] = [(i + 1) % 4, (i + 2) % 4, (i + 3) % 4];
        mix(2 * i, 8 + 2 * b, 16 + 2 * c, 24 + 2 * d, s[8 + 2 * i], s[9 + 2 * i]);
      }
    }
    for (let i = 0; i < 16; i++) this.state[i] ^= v[i] ^ v[i + 16];
    this.filled = 0;
  }
}

async function leave() {
  await call("POST", "/v1/producers/leave", {}, { awayMs: 10_000 });
  process.exit(0);
}

const run = await call("POST", "/v1/producers/register", { model: "uniform over letters", engines: 0 });
process.on("SIGTERM", leave);
setInterval(() => call("POST", "/v1/producers/heartbeat", {}), run.lease_timeout_s * 250);
let [version, lags] = [-1, "the first weights"];
let request = randomUUID(); // the same until it brings a prompt: it is the job's place in the line
for (;;) {
  try {
    if (lags) version = await load();
    const answer = await call("POST", "/v1/leases", { request, wait_s: 20 });
    if (answer.prompts.length) request = randomUUID();
    for (const prompt of answer.prompts) {
      const samples = prompt.samples.map(({ index }) => sampleOf(prompt, index, version));
      await call("POST", "/v1/groups", { lease: prompt.lease, samples });
    }
    if (answer.is_exhausted) break;
    lags = answer.lags;
  } catch (failure) {
    if (!(failure instanceof Gone)) throw failure;
    console.error(`again: ${failure.message}`);
    await sleep(500); // go on with the weights and prompts that are there, or will be
  }
}
await leave();
