import { describe, expect, it } from "vitest";
import { emptyAtlas, gridOf, ordered, paint, placeAt, placeOf, receive, SORTS } from "../src/draw/atlas";
import { paintCache } from "../src/draw/cache";
import { layoutFlow } from "../src/draw/flow";
import { pixels } from "../src/draw/matrix";
import { thickness } from "../src/draw/paintFlow";
import { channels, codeOf, css, palette, valueOf, wantsDarkLetters } from "../src/draw/scales";
import type { AtlasHeader, LayerKind, PointCard } from "../src/protocol";

const light = palette(false);
const dark = palette(true);

const luminance = (colour: string) => {
  const [r, g, b] = channels(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

describe("scales", () => {
  it("puts zero in the middle and opposite signs at opposite ends", () => {
    expect(codeOf(0, "signed", 2)).toBe(128);
    expect(codeOf(2, "signed", 2)).toBe(255);
    expect(codeOf(-2, "signed", 2)).toBe(1);
    expect(codeOf(-99, "signed", 2)).toBe(1);
  });

  it("keeps hidden cells apart from every value", () => {
    for (const hidden of [NaN, Infinity, -Infinity]) expect(codeOf(hidden, "signed", 1)).toBe(0);
    expect(codeOf(0, "weights", 1)).toBe(1);
    expect(valueOf(0, "weights", 1)).toBeNull();
  });

  it("gives back a value to half a step", () => {
    for (const value of [-1.5, -0.31, 0, 0.002, 1.49]) {
      expect(Math.abs(valueOf(codeOf(value, "signed", 1.5), "signed", 1.5)! - value)).toBeLessThan(1.5 / 127 / 2 + 1e-9);
    }
  });

  it.each([["light", light], ["dark", dark]] as const)("rises or falls in lightness all the way for weights, %s", (_, colours) => {
    const steps = Array.from({ length: 255 }, (_, i) => luminance(css(colours.weights[i + 1])));
    const rising = steps[254] > steps[0];
    for (let i = 1; i < steps.length; i++) expect(rising ? steps[i] >= steps[i - 1] - 1e-3 : steps[i] <= steps[i - 1] + 1e-3).toBe(true);
    expect(Math.abs(steps[254] - steps[0])).toBeGreaterThan(0.5);
  });

  it.each([["light", light], ["dark", dark]] as const)("tells positive from negative by blue against red, %s", (_, colours) => {
    const [pr, , pb] = channels(css(colours.signed[220]));
    const [nr, , nb] = channels(css(colours.signed[36]));
    expect(pr - pb).toBeGreaterThan(60);
    expect(nb - nr).toBeGreaterThan(60);
  });

  it("writes on every colour in letters of enough contrast", () => {
    for (const table of [light.signed, light.weights, dark.signed, dark.weights]) {
      for (let code = 1; code < 256; code++) {
        const ground = luminance(css(table[code]));
        const letters = wantsDarkLetters(table[code]) ? luminance("#16181b") : 1;
        const contrast = (Math.max(ground, letters) + 0.05) / (Math.min(ground, letters) + 0.05);
        expect(contrast).toBeGreaterThan(4.1);
      }
    }
  });
});

describe("a matrix", () => {
  it("has one pixel a cell, transparent where it is hidden", () => {
    const out = pixels({ codes: Uint8Array.of(0, 1, 128, 255), rows: 2, columns: 2, kind: "signed" }, light);
    expect(out[0]).toBe(0);
    expect([out[1], out[2], out[3]]).toEqual([light.signed[1], light.signed[128], light.signed[255]]);
  });
});

function atlasOf(layers: number, heads: number, side: number) {
  const atlas = emptyAtlas("run", layers, heads);
  const each = (side * (side + 1)) / 2;
  const header: AtlasHeader = {
    first: 0,
    stop: layers,
    heads,
    side,
    triangle: true,
    scores: Array.from({ length: layers * heads }, (_, i) => ({
      previous: (i * 7) % 10 / 10,
      first: i / 100,
      itself: 0.5,
      entropy: (i * 3) % 11 / 11,
      induction: i % 2 ? i / 50 : null,
    })),
  };
  receive(atlas, header, Uint8Array.from({ length: layers * heads * each }, (_, i) => 1 + (i % 255)));
  return atlas;
}

describe("the atlas", () => {
  const atlas = atlasOf(5, 3, 4);

  it("gives each head its own codes", () => {
    expect(atlas.codes.length).toBe(15);
    expect(Array.from(atlas.codes[1])).toEqual([11, 12, 13, 14, 15, 16, 17, 18, 19, 20]);
  });

  it.each(SORTS)("holds every head once, sorted by %s", (sort) => {
    expect([...ordered(atlas, sort)].sort((a, b) => a - b)).toEqual(Array.from({ length: 15 }, (_, i) => i));
  });

  it("puts the highest score first, and heads without one last", () => {
    const previous = ordered(atlas, "previous").map((i) => atlas.scores[i]!.previous);
    expect(previous).toEqual([...previous].sort((a, b) => b - a));
    const induction = ordered(atlas, "induction").map((i) => atlas.scores[i]!.induction);
    expect(induction.slice(7).every((score) => score === null)).toBe(true);
    const entropy = ordered(atlas, "entropy").map((i) => atlas.scores[i]!.entropy);
    expect(entropy).toEqual([...entropy].sort((a, b) => a - b));
  });

  it.each([[1100], [300], [60]])("finds under the pointer what it drew there, %d pixels wide", (width) => {
    for (const sort of ["layer", "previous"] as const) {
      const grid = gridOf(atlas, width, sort);
      for (let place = 0; place < 15; place++) {
        const [column, row] = placeOf(place, atlas, grid, sort);
        expect(placeAt(column, row, atlas, grid, sort)).toBe(place);
        expect(grid.gap + (column + 1) * (grid.cell + grid.gap)).toBeLessThanOrEqual(width + 1);
        expect(row).toBeLessThan(grid.rows);
      }
      expect(placeAt(-1, 0, atlas, grid, sort)).toBe(-1);
      expect(placeAt(grid.columns, 0, atlas, grid, sort)).toBe(-1);
    }
  });

  it("paints the corner cells of a head in their colours", () => {
    const grid = { columns: 5, rows: 3, cell: 8, gap: 2 };
    const width = 5 * 10 + 2;
    const out = new Uint32Array(width * (3 * 10 + 2));
    paint(out, width, atlas, ordered(atlas, "layer"), grid, "layer", 1, light);
    const first = atlas.codes[0];
    expect(out[2 * width + 2]).toBe(light.weights[first[0]]); // row 0, column 0
    expect(out[9 * width + 2]).toBe(light.weights[first[6]]); // row 3, column 0
    expect(out[9 * width + 9]).toBe(light.weights[first[9]]); // row 3, column 3
    expect(out[0]).toBe(0); // the gap stays clear
    const second = atlas.codes[1]; // head 1 of layer 0 stands below head 0
    expect(out[12 * width + 2]).toBe(light.weights[second[0]]);
  });

  it("is painted at the size of a real model, 30 × 9 heads of 64 tokens", () => {
    const large = atlasOf(30, 9, 64);
    const grid = gridOf(large, 1100, "layer");
    const out = new Uint32Array(2200 * 2 * Math.ceil(grid.rows * (grid.cell + grid.gap) + grid.gap));
    paint(out, 2200, large, ordered(large, "layer"), grid, "layer", 2, light);
    expect(out.some((pixel) => pixel !== 0)).toBe(true);
  });
});

function kindOf(names: string[], sizes: Record<string, number>, dots: [string, string], parallel = false): LayerKind {
  const shapes: Record<string, string[]> = { "attn.scores": ["H", "T", "S"], "attn.pattern": ["H", "T", "S"] };
  const points = names.map((name): PointCard => ({
    name,
    symbols: shapes[name] ?? ["T", "d"],
    meaning: "",
    reason: "",
    chapter: "",
    kind: "signed",
    formula: "",
  }));
  return {
    first: 0, stop: 2, sizes, points, facts: [], dot_inputs: dots, parallel, placement: "pre", gated: true, activation: "silu", gate_input: false,
  };
}

const ATTENTION = ["attn.v", "attn.scores", "attn.pattern", "attn.z", "attn.out", "mlp.out", "resid_pre", "resid_post"];
const KINDS: Record<string, LayerKind> = {
  llama: kindOf(
    [...ATTENTION, "resid_mid", "attn.norm", "attn.q_rot", "attn.k_rot", "mlp.norm", "mlp.gate", "mlp.up", "mlp.act"],
    { H: 9, H_kv: 3 }, ["attn.q_rot", "attn.k_rot"],
  ),
  experts: kindOf(
    [...ATTENTION, "resid_mid", "attn.norm", "attn.q_rot", "attn.k_rot", "mlp.norm", "moe.scores", "moe.chosen", "moe.gates", "moe.expert_out", "moe.shared_out"],
    { H: 32, H_kv: 8, E: 128, k: 8 }, ["attn.q_rot", "attn.k_rot"],
  ),
  "few experts": kindOf(
    [...ATTENTION, "resid_mid", "attn.norm", "attn.q_rot", "attn.k_rot", "mlp.norm", "moe.scores", "moe.chosen", "moe.gates", "moe.expert_out"],
    { H: 6, H_kv: 2, E: 4, k: 1 }, ["attn.q_rot", "attn.k_rot"],
  ),
  latent: kindOf(
    [...ATTENTION, "resid_mid", "attn.norm", "attn.q_latent", "attn.kv_latent", "attn.q_rot", "attn.k_rot", "mlp.norm", "mlp.gate", "mlp.up", "mlp.act"],
    { H: 16, H_kv: 16 }, ["attn.q_rot", "attn.k_rot"],
  ),
  "post-norm": kindOf([...ATTENTION, "resid_mid", "attn.q", "attn.k", "mlp.up", "mlp.act"], { H: 12, H_kv: 12 }, ["attn.q", "attn.k"]),
  parallel: kindOf(
    [...ATTENTION, "attn.norm", "attn.q_rot", "attn.k_rot", "mlp.up", "mlp.act"], { H: 8, H_kv: 1 }, ["attn.q_rot", "attn.k_rot"], true,
  ),
};

describe.each(Object.keys(KINDS))("the flow of a %s layer", (name) => {
  it.each([[1, 1100], [3, 1100], [14, 1060], [14, 360], [64, 1500], [2000, 1100]])("at %d tokens in %d pixels lies inside, nothing on top of anything", (tokens, width) => {
    const flow = layoutFlow(KINDS[name], tokens, width);
    for (const box of flow.boxes) {
      expect(box.x).toBeGreaterThanOrEqual(0);
      expect(box.x + box.w).toBeLessThanOrEqual(flow.width);
      expect(box.y + box.h).toBeLessThanOrEqual(flow.height + 0.01);
      for (const cell of box.heads) {
        expect(cell.h).toBeGreaterThan(0.5);
        expect(cell.y).toBeGreaterThanOrEqual(box.y - 0.01);
        expect(cell.y + cell.h).toBeLessThanOrEqual(box.y + box.h + 0.01);
      }
    }
    for (let i = 0; i < flow.boxes.length; i++) {
      for (let j = 0; j < i; j++) {
        const [a, b] = [flow.boxes[i], flow.boxes[j]];
        const apart = a.x + a.w <= b.x || b.x + b.w <= a.x || a.y + a.h <= b.y || b.y + b.h <= a.y;
        expect(apart, `${a.point} and ${b.point}`).toBe(true);
      }
    }
  });

  it("has room for positions that are added as rows, still without anything on top of anything", () => {
    const flow = layoutFlow(KINDS[name], 12, 1100, true, true);
    const boxes = flow.boxes.filter((box) => box.y === flow.laneTop).sort((a, b) => a.x - b.x);
    expect(boxes.slice(0, 3).map((box) => box.point)).toEqual(["embed.tokens", "embed.positions", "embed.out"]);
    for (let i = 1; i < boxes.length; i++) expect(boxes[i].x).toBeGreaterThanOrEqual(boxes[i - 1].x + boxes[i - 1].w);
    expect(flow.pluses.flatMap((plus) => plus.sign ?? [])).toEqual(["+", "="]);
  });

  it("says of every arrow what happens on the way", () => {
    for (const arrow of layoutFlow(KINDS[name], 12, 1100).arrows) expect(arrow.label.length).toBeGreaterThan(20);
  });

  it("shows every query head, and as many key heads as there are", () => {
    const flow = layoutFlow(KINDS[name], 12, 1100);
    const { H, H_kv } = KINDS[name].sizes;
    const [q, k] = KINDS[name].dot_inputs;
    expect(flow.boxes.find((box) => box.point === q)!.heads.length).toBe(H);
    expect(flow.boxes.find((box) => box.point === k)!.heads.length).toBe(H_kv);
    expect(flow.boxes.find((box) => box.point === "attn.z")!.heads.length).toBe(H);
  });

  it("runs the stream from the embedding to the logits without a gap", () => {
    const flow = layoutFlow(KINDS[name], 12, 1100);
    const covered = [
      ...flow.strands.map(({ from, to }) => [from, to]),
      ...flow.boxes.filter((box) => box.tone === "stream").map((box) => [box.x, box.x + box.w]),
    ].sort((a, b) => a[0] - b[0]);
    let end = covered[0][0];
    for (const [from, to] of covered) {
      expect(from).toBeLessThanOrEqual(end + 0.01);
      end = Math.max(end, to);
    }
    expect(end).toBeGreaterThan(flow.logits.x - 40);
  });
});

describe("the cache", () => {
  /** What is painted: rectangles with their colours, and what is cleared between the rows. */
  function painted(tokens: number, grown: number, token: number | null, column: number, layers = 30, height = 60) {
    const filled: { colour: string; x: number; y: number; w: number; h: number }[] = [];
    const cleared: number[] = [];
    const context = {
      fillStyle: "",
      fillRect(x: number, y: number, w: number, h: number) {
        filled.push({ colour: this.fillStyle, x, y, w, h });
      },
      clearRect: (_x: number, y: number) => cleared.push(y),
      setLineDash: () => undefined,
      strokeRect: () => undefined,
    };
    const cache = { layers, tokens, grown, token, column, height };
    paintCache(context as unknown as CanvasRenderingContext2D, cache, light);
    return { filled, cleared };
  }

  it("of a long text is one rectangle for what was typed and one for what was drawn", () => {
    const { filled } = painted(2000, 40, null, 0.125);
    expect(filled.map(({ colour, x, w }) => [colour, x, w])).toEqual([
      [light.stream, 0, 245],
      [light.attention, 245, 5],
    ]);
  });

  it("shows a chosen token, however narrow its column is", () => {
    const chosen = painted(2000, 0, 1200, 0.125).filled.at(-1)!;
    expect(chosen).toMatchObject({ colour: light.selected, x: 150, w: 1.5, h: 60 });
  });

  it("of a short text has a column for every token, with a gap between them, and a line under every layer", () => {
    const { filled, cleared } = painted(5, 2, null, 16, 3, 21);
    expect(filled.map(({ colour, x, w }) => [colour, x, w])).toEqual(
      [0, 1, 2, 3, 4].map((t) => [t < 3 ? light.stream : light.attention, 16 * t, 15]),
    );
    expect(cleared).toEqual([6, 13, 20]);
  });
});

describe("a strand", () => {
  it("fills its room at the longest row, and no more at one that is infinite", () => {
    expect(thickness(40, 40, 10)).toBeCloseTo(8.6);
    expect(thickness(Infinity, 40, 10)).toBeCloseTo(8.6);
    expect(thickness(0, 40, 10)).toBe(0.6);
  });
});
