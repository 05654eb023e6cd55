import { describe, expect, it } from "vitest";
import { decode } from "../src/api";
import { divergence, expertOff, offers, say, scarsOf } from "../src/edits";
import { bytes, count, number, percent, shortened, visible, work } from "../src/format";
import type { EditCard, LayerKind, Token } from "../src/protocol";
import { distribution, draw, entropyBits, ranked, softmax, unsampled } from "../src/sampling";
import { DEFAULTS, fromHash, toHash, type Place } from "../src/state/permalink";
import { aligned } from "../src/tokens";

const logits = Float32Array.of(2, 1, 0, -1, 1, -3);

describe("sampling", () => {
  it("ranks by logit, the lower id first among equals", () => {
    expect(Array.from(ranked(logits))).toEqual([0, 1, 4, 2, 3, 5]);
    expect(Array.from(ranked(Float32Array.of(-0, 0, -1e-30, 1e-30)))).toEqual([3, 0, 1, 2]);
  });

  it("ranks a large vocabulary as comparing would", () => {
    const many = Float32Array.from({ length: 49_152 }, (_, i) => Math.fround(Math.sin(i * 12.9898) * 43758.5453 % 17));
    const order = ranked(many);
    const expected = Int32Array.from(many.keys()).sort((a, b) => many[b] - many[a] || a - b);
    expect(order).toEqual(expected);
  });

  it("turns logits into probabilities that sum to one at any temperature", () => {
    for (const temperature of [0.01, 0.3, 1, 3]) {
      const p = softmax(logits, temperature);
      expect(p.reduce((a, b) => a + b)).toBeCloseTo(1, 12);
      expect(p.indexOf(Math.max(...p))).toBe(0);
    }
    expect(Array.from(softmax(logits, 0))).toEqual([1, 0, 0, 0, 0, 0]);
  });

  it("works the model's own distribution out once, and cuts a copy of it", () => {
    const own = unsampled(logits);
    expect(own).toEqual(softmax(logits, 1));
    expect(distribution(logits, ranked(logits), { ...DEFAULTS, topK: 1 }).p).toEqual(Float64Array.of(1, 0, 0, 0, 0, 0));
    expect(unsampled(logits)).toBe(own);
    expect(own).toEqual(softmax(logits, 1));
  });

  it("keeps exactly k, or the smallest set whose probabilities reach p", () => {
    const order = ranked(logits);
    const keeps = (settings: object) => distribution(logits, order, { ...DEFAULTS, ...settings }).kept;
    expect(keeps({ topK: 2 })).toBe(2);
    expect(keeps({ topK: 99 })).toBe(6);
    const p = softmax(logits, 1);
    expect(keeps({ topP: p[0] - 1e-6 })).toBe(1);
    expect(keeps({ topP: p[0] + 1e-6 })).toBe(2);
    expect(keeps({ minP: Math.exp(-1) - 1e-6 })).toBe(3);
    expect(keeps({ temperature: 0, topK: 3 })).toBe(1);
    const cut = distribution(logits, order, { ...DEFAULTS, topK: 2 });
    expect(cut.p[0] + cut.p[1]).toBeCloseTo(1, 12);
    expect(cut.p[4]).toBe(0);
  });

  it("draws where a number falls on the line of probabilities by id", () => {
    const d = distribution(logits, ranked(logits), DEFAULTS);
    expect(draw(d, 0)).toBe(0);
    expect(draw(d, d.p[0] - 1e-9)).toBe(0);
    expect(draw(d, d.p[0] + 1e-9)).toBe(1);
    expect(draw(d, 1 - 1e-12)).toBe(5);
  });

  it("knows how undecided a distribution is", () => {
    expect(entropyBits(Float64Array.of(0.5, 0.5))).toBeCloseTo(1);
    expect(entropyBits(Float64Array.of(1, 0))).toBe(0);
    expect(divergence(Float64Array.of(0.5, 0.5), Float64Array.of(0.5, 0.5))).toBe(0);
    expect(divergence(Float64Array.of(1, 0), Float64Array.of(0.5, 0.5))).toBeCloseTo(Math.log(2));
  });
});

describe("a link", () => {
  const place: Place = {
    model: "toy", text: "a b\nc & d=#?", ids: null, view: "heads", layer: 3, head: 5, pinned: "layers.3.attn.pattern",
    cell: [4, 2], token: 1, expert: 2, settings: { temperature: 0.7, topK: 40, topP: 0.9, minP: 0.05 }, seed: 12,
    edits: [{ zero: "layers.3.attn.z", heads: [5] }],
  };

  it("holds the whole place", () => {
    expect(fromHash(`#${toHash(place)}`)).toEqual(place);
    expect(fromHash(toHash({ ...place, text: null, ids: [0, 5, 6] })).ids).toEqual([0, 5, 6]);
  });

  it("leaves out what is at its default", () => {
    expect(toHash({ ...fromHash(""), model: "toy", text: "a" })).toBe("m=toy&p=a");
  });

  it.each(["#l=-3&h=x&T=hot&k=0&tp=7&c=1.2.3&e={", "#e=null", "#e=[1,2]", "#i=1..2", "#T=", "#%E0%A4%A"])("never breaks on %s", (hash) => {
    const read = fromHash(hash);
    expect(read.layer).toBe(0);
    expect(read.settings).toEqual(DEFAULTS);
    expect(read.edits).toEqual([]);
  });
});

const token = (piece: string, id = 1): Token => ({ id, piece });

describe("tokens in the text", () => {
  const whole = (text: string, pieces: string[]) => aligned(text, pieces.map((piece) => token(piece)));
  it.each([
    ["The cat sat", ["The", " cat", " sat"]],
    ["<BOS> dragon  drinks", ["<BOS>", "dragon", "drinks"]],
    ["a\n\tb", ["a", "\\n", "\\t", "b"]],
    ["hi 🙂!", ["hi", " ", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "!"]],
    ["hi ─► 🙂", ["hi", " <0xE2><0x94>", "<0x80>", "<0xE2>", "<0x96>", "<0xBA>", " <0xF0><0x9F>", "<0x99><0x82>"]],
    ["a <0xE2> b", ["a", " <", "0xE2", "> b"]],
    ["Hello", ["<s>", " Hello"]],
    ["The Embeddings sat", ["[CLS]", "the", "em", "##bed", "##dings", "sat", "[SEP]"]],
  ])("spells %j from %j", (text, pieces) => {
    const parts = whole(text, pieces);
    expect(parts.map((part) => part.text).join("")).toBe(text);
    expect(parts.filter((part) => part.token === null && part.text.trim() !== "")).toEqual([]);
  });

  it("leaves what has been typed since without tokens", () => {
    const parts = whole("The cats", ["The", " cat"]);
    expect(parts).toEqual([{ text: "The", token: 0 }, { text: " cat", token: 1 }, { text: "s", token: null }]);
    expect(whole("Now", ["The"])).toEqual([{ text: "Now", token: null }]);
  });
});

describe("what is written", () => {
  it.each([
    [0, "0"], [1.5, "1.5"], [-0.131234, "−0.1312"], [123456, "123456"], [null, "−∞"], [NaN, "×"], [-Infinity, "−∞"],
    [1e-7, "1.00×10⁻⁷"], [2, "2"], [100, "100"],
  ])("writes %s as %s", (value, text) => expect(number(value as number | null)).toBe(text));
  it("writes shares, counts, work and bytes as people read them", () => {
    expect(percent(0.92345)).toBe("92.3 %");
    expect(percent(0.00001)).toBe("< 0.01 %");
    expect(count(49152)).toBe("49 152");
    expect(work(2.7e8)).toBe("270 MFLOP");
    expect(bytes(645120)).toBe("645 kB");
    expect(visible(" a\\n")).toBe("·a⏎");
    expect(shortened("John gave", 9)).toBe("John gave");
    expect(shortened("John gave a", 9)).toBe("John gav…");
  });
});

describe("edits", () => {
  const kind = {
    first: 0, stop: 4, sizes: { H: 8 }, facts: [], dot_inputs: [], parallel: false, placement: "pre", gated: true, activation: "silu",
    points: ["attn.pattern", "attn.out", "mlp.out", "mlp.act"].map((name) => ({
      name, symbols: name === "attn.pattern" ? ["H", "T", "S"] : ["T", "d"], meaning: "", reason: "", chapter: "", kind: "signed", formula: "",
    })),
  } as LayerKind;
  const tokens = [token("a"), token(" b"), token(" c")];

  it("offers what fits what is chosen", () => {
    const labels = (pinned: string | null, cell: [number, number] | null, at: number | null) =>
      offers(kind, 2, 3, pinned, cell, at, tokens).map((offer) => offer.label);
    expect(labels(null, null, null)).toEqual(["head 3 off", "attention off", "feed-forward off"]);
    expect(labels("layers.2.attn.pattern", [2, 1], null)[0]).toBe("cut 2 → 1");
    expect(labels("layers.2.attn.pattern", [1, 2], null)[0]).toBe("head 3 off"); // masked: nothing to cut
    expect(labels("layers.2.mlp.act", [1, 77], null)[0]).toBe("neuron 77 off");
    expect(labels(null, null, 1)).toContain("hide “·b”");
  });

  it("tells every edit that it offers in words", () => {
    for (const offer of offers(kind, 2, 3, "layers.2.mlp.act", [1, 77], 1, tokens)) expect(say(offer.edit, tokens)).not.toMatch(/[{}]/);
    expect(say({ without: "mask" }, tokens)).toBe("without the mask");
    expect(say({ knockout: "layers.2.attn.masked", heads: [3], edges: [[2, 1]] }, tokens)).toBe(
      "layer 2, head 3: “·c” no longer looks at “·b”",
    );
  });

  it("scars what the server says that it touched", () => {
    const card: EditCard = { edit: { zero: "layers.2.attn.z", heads: [3] }, words: "", points: ["layers.2.attn.z"], elements: 1, changed: 1 };
    expect(scarsOf([card], 2)).toEqual(new Map([["attn.z", [{ heads: [3], edges: [], keys: [] }]]]));
    expect(scarsOf([card], 1).size).toBe(0);
  });
});

describe("tensors on the wire", () => {
  function framed(header: object, body: Uint8Array): Uint8Array {
    let text = JSON.stringify(header);
    while ((text.length + 4) % 8) text += " ";
    const out = new Uint8Array(4 + text.length + Math.ceil(body.length / 8) * 8);
    new DataView(out.buffer).setUint32(0, text.length, true);
    out.set(new TextEncoder().encode(text), 4);
    out.set(body, 4 + text.length);
    return out;
  }
  it("are read one after another, whatever their lengths", () => {
    const head = { point: "p", of: [1, 1, 3], start: [0, 0, 0], kind: "signed", scale: 1, largest: 1, beyond: 0 };
    const one = framed({ ...head, shape: [1, 1, 3], format: "u8" }, Uint8Array.of(7, 8, 9));
    const two = framed({ ...head, point: "q", shape: [1, 1, 1], format: "f32" }, new Uint8Array(Float32Array.of(2.5).buffer));
    const all = new Uint8Array(one.length + two.length);
    all.set(one);
    all.set(two, one.length);
    const found = decode(all.buffer);
    expect(found.map((tensor) => tensor.point)).toEqual(["p", "q"]);
    expect(Array.from(found[0].u8!)).toEqual([7, 8, 9]);
    expect(found[1].f32![0]).toBe(2.5);
  });
});
