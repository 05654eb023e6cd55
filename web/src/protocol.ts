// Made from src/cutaway/serve/protocol.py by `python -m cutaway.serve.typescript`; do not edit.

export const MIDDLE = 128;
export const STEPS = 127;
export const WEIGHT_STEPS = 254;

export type Format = "u8" | "f32";
export type Kind = "signed" | "weights" | "ids";
export type State = "ready" | "loading" | "here" | "absent" | "failed";

/** Every refusal: one or two sentences for people, and a word for programs. */
export interface Failure {
  error: string;
  kind: "refused" | "busy" | "missing" | "forbidden" | "too long";
}

/** One model that may be chosen; `note` says why it cannot be, or how to get it. */
export interface ModelEntry {
  name: string;
  title: string;
  size_bytes: number;
  state: State;
  note: string;
}

/** A point as a kind of layer has it: what it is, why, and its formula in LaTeX. */
export interface PointCard {
  name: string;
  symbols: string[];
  meaning: string;
  reason: string;
  chapter: string;
  kind: Kind;
  formula: string;
}

/** Layers `first:stop`, which are built alike. */
export interface LayerKind {
  first: number;
  stop: number;
  sizes: Record<string, number>;
  points: PointCard[];
  facts: string[];
  dot_inputs: string[];
  parallel: boolean;
  placement: "pre" | "post";
  gated: boolean;
  activation: string;
  gate_input: boolean;
}

/** What a model is; asked for once. */
export interface ModelCard {
  name: string;
  origin: string;
  engine: string;
  dtype: string;
  parameters: number;
  sizes: Record<string, number>;
  points: PointCard[];
  layers: LayerKind[];
  context_length: number | null;
  longest: number;
  generates: boolean;
  examples: string[];
  stop_ids: number[];
  parts: string[];
}

/** One token of the prompt. */
export interface Token {
  id: number;
  piece: string;
}

/** One candidate for the next token, with its logit and its probability at temperature 1. */
export interface NextTokenCard {
  id: number;
  piece: string;
  logit: number;
  p: number;
}

/** FLOPs of this pass whole, of its last token alone with a cache, and what that cache weighs. */
export interface PassWork {
  whole: number;
  step: number;
  cache_bytes: number;
  cache_bytes_per_token: number;
}

/** One edit of a run: its JSON form, in words, the points at which it acted, on how many elements, how many it made others. */
export interface EditCard {
  edit: Record<string, unknown>;
  words: string;
  points: string[];
  elements: number;
  changed: number;
}

/** The answer to a run. `captured` says which points are at hand; the others are computed when asked for. */
export interface Manifest {
  run: string;
  model: string;
  tokens: Token[];
  added: string;
  text: string | null;
  edits: EditCard[];
  seconds: number;
  captured: "all" | "overview";
  next: NextTokenCard[];
  work: PassWork;
}

/** What stands before a tensor's numbers. */
export interface TensorHeader {
  point: string;
  shape: number[];
  of: number[];
  start: number[];
  format: Format;
  kind: Kind;
  scale: number;
  largest: number;
  beyond: number;
}

/** What a head's pattern is like, each from 0 to 1; `induction` is null where no token repeats. */
export interface HeadScores {
  previous: number;
  first: number;
  itself: number;
  entropy: number;
  induction: number | null;
}

/** Before the patterns of layers `first:stop`: one `side × side` triangle of weights for each head. */
export interface AtlasHeader {
  first: number;
  stop: number;
  heads: number;
  side: number;
  triangle: boolean;
  scores: HeadScores[];
}

/** One product of a sum: where it stands, its two factors and what they give. */
export interface Term {
  at: string;
  left: number;
  right: number;
  product: number;
}

/** One number of a tensor and the arithmetic that made it. */
export interface Cell {
  point: string;
  at: number[];
  value: number | null;
  hidden: boolean;
  edited: boolean;
  left: string;
  right: string;
  terms: Term[];
  rest_count: number;
  rest_sum: number;
  steps: string[];
  left_row: number[];
  right_row: number[];
}

/** Where a point comes from and where it goes, as addresses, and the weights that are used on the way. */
export interface Lineage {
  point: string;
  inputs: string[];
  consumers: string[];
  weights: string[];
  code: string;
}

/** Tokens that would follow, one by one. */
export interface Continuation {
  tokens: NextTokenCard[];
  finish: string;
}
