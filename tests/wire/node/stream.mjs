// A client that streams generations, written from PROTOCOL.md and GENERATION.md alone.
//
//     node stream.mjs ADDRESS '[{"prompts": [[1, 2]], "n": 1, "sampling": {}, "credit": 8}]'
//
// Every request is a stream. On stdout, in JSON lines: {"taken": tokens of all streams so far} now and then; at the end, for each
// request, {"id", "streamed": the tokens of its sequences that came as a stream, "answer": all of them, "ended", "spans"}.
import { randomBytes } from "node:crypto";
import { Dealer } from "./dealer.mjs";
import { decode, encode } from "./msgpack.mjs";

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const uint32 = (numbers) => Buffer.from(Uint32Array.from(numbers).buffer);
const int32 = (numbers) => Buffer.from(Int32Array.from(numbers).buffer);
const numbers = (frame) => Array.from({ length: frame.length / 4 }, (_, i) => frame.readInt32LE(4 * i));

class Stream {
  constructor(id, { prompts, n = 1, sampling = {}, credit = 1024 }) {
    Object.assign(this, { id, prompts, n, sampling, credit });
    this.sequences = prompts.flatMap(() => Array.from({ length: n }, () => []));
    this.ended = new Map();
    this.restart();
  }

  // The next `generate` of it: credit counts from there, and so does what it said of it.
  restart() {
    this.taken = this.told = 0;
  }

  message() {
    this.restart();
    const items = this.prompts.flat();
    const header = {
      type: "generate", id: this.id, n: this.n, sampling: this.sampling, stream: true, credit: this.credit,
      frames: [["items", "int32", [items.length]], ["item_lengths", "uint32", [this.prompts.length]]],
    };
    const payload = [int32(items), uint32(this.prompts.map((prompt) => prompt.length))];
    const output = this.sequences.flat();
    if (output.length) {
      header.frames.push(["output", "int32", [output.length]], ["output_lengths", "uint32", [this.sequences.length]]);
      header.ended = [...this.ended].map(([sequence, [reason, matched]]) => [sequence, reason, matched]);
      payload.push(int32(output), uint32(this.sequences.map((sequence) => sequence.length)));
    }
    return [encode(header), ...payload];
  }

  take(sequence, at, tokens) {
    const has = this.sequences[sequence];
    if (at !== has.length) throw new Error(`stream ${this.id}, sequence ${sequence}: position ${at} after ${has.length} tokens`);
    has.push(...tokens);
    this.taken += tokens.length;
    if (this.taken - this.told > this.credit) throw new Error(`stream ${this.id}: more than its credit of ${this.credit}`);
  }
}

class Client {
  constructor(address, requests) {
    this.address = address;
    this.identity = { client: randomBytes(16), token: randomBytes(16) };
    this.incarnation = -1;
    this.epoch = 0;
    this.total = 0;
    this.welcomed = false;
    this.unanswered = new Map(requests.map((request, i) => [i + 1, new Stream(i + 1, request)]));
    this.later = new Set();
    this.connect();
    this.timer = setInterval(() => this.tick(), 250);
  }

  connect() {
    this.welcomed = false;
    this.heardAt = Date.now();
    const link = new Dealer(this.address, {
      opened: () => this.greet(),
      heard: (frames) => link === this.link && this.heard(frames),
      closed: () => {
        this.welcomed = false;
        if (link === this.link && this.unanswered.size) setTimeout(() => link === this.link && this.connect(), 100);
      },
    });
    this.link = link;
  }

  send(header, ...payload) {
    this.link.send([encode(header), ...payload]);
  }

  greet() {
    this.welcomed = false;
    this.incarnation += 1;
    this.send({ type: "hello", ...this.identity, incarnation: this.incarnation, epoch: this.epoch });
  }

  tick() {
    if (Date.now() - this.heardAt > 8000) {
      this.link.close();
      this.connect();
    } else if (this.welcomed) this.send({ type: "ping" });
  }

  heard([frame0, ...payload]) {
    this.heardAt = Date.now();
    const header = decode(frame0);
    this[`on_${header.type}`]?.(header, payload);
  }

  on_welcome({ incarnation = 0, epoch }) {
    if (incarnation !== this.incarnation || epoch < this.epoch) return;
    this.epoch = epoch;
    this.welcomed = true;
    for (const stream of this.unanswered.values()) if (!this.later.has(stream.id)) this.link.send(stream.message());
  }

  on_ping({ at = 0 }) {
    this.send({ type: "pong", at });
  }

  on_pong({ epoch = 0 }) {
    if (epoch > this.epoch) this.greet();
  }

  on_tokens({ runs, ended = [] }, [frame]) {
    const tokens = numbers(frame);
    let first = 0;
    for (const [id, sequence, at, count] of runs) {
      const stream = this.unanswered.get(id);
      stream?.take(sequence, at, tokens.slice(first, first + count));
      first += count;
    }
    for (const [id, sequence, reason, matched = null] of ended) this.unanswered.get(id)?.ended.set(sequence, [reason, matched]);
    for (const id of new Set(runs.map(([id]) => id))) {
      const stream = this.unanswered.get(id);
      if (stream) this.send({ type: "credit", id, taken: (stream.told = stream.taken) });
    }
    this.total += first;
    if (first) say({ taken: this.total });
  }

  on_generated({ id, starts = [], ended, spans }, [output, lengths]) {
    const stream = this.unanswered.get(id);
    this.send({ type: "ack", ids: [id] });
    if (!stream) return;
    const tokens = numbers(output);
    let first = 0;
    const answer = numbers(lengths).map((length, i) => [...stream.sequences[i].slice(0, starts[i] ?? 0), ...tokens.slice(first, (first += length))]);
    say({ id, streamed: stream.sequences, ended, answer, spans });
    this.finish(id);
  }

  on_error(error) {
    const { code, id = null, incarnation = null, retry_after_ms = 100 } = error;
    if (incarnation !== null) {
      if (incarnation === this.incarnation) throw new Error(`hello: ${code}: ${error.message}`);
    } else if (code === "hello_required") {
      if (this.welcomed) this.greet();
    } else if (id === null || code === "id_reused") throw new Error(`${code}: ${error.message}`);
    else if (code === "busy") {
      this.later.add(id);
      setTimeout(() => {
        this.later.delete(id);
        if (this.welcomed && this.unanswered.has(id)) this.link.send(this.unanswered.get(id).message());
      }, retry_after_ms * (1 + Math.random()));
    } else if (code !== "shutting_down" || id !== null) {
      say({ id, code, message: error.message });
      this.send({ type: "ack", ids: [id] });
      this.finish(id);
    }
  }

  finish(id) {
    this.unanswered.delete(id);
    if (this.unanswered.size) return;
    clearInterval(this.timer);
    this.send({ type: "goodbye" });
    this.link.close();
  }
}

new Client(process.argv[2], JSON.parse(process.argv[3]));
