/** What the page is looking at: one model, one prompt, one pass over it, and the place in it. */
import { api, Refused, type Edit } from "../api";
import type { Atlas } from "../draw/atlas";
import { palette } from "../draw/scales";
import type { ModelCard, ModelEntry } from "../protocol";
import { distribution, draw, type Settings } from "../sampling";
import { frameAfter } from "./frame";
import { History } from "./history.svelte";
import { atlasOf, flowOf, look, type Shown } from "./look";
import { Looking } from "./looking.svelte";
import { Cards, watchModels } from "./models";
import { fromHash, type Place, toHash, type View } from "./permalink";
import { headFor, layerKind, pointCard } from "./points";

const TOY = "toy";
const UNIFORMS = 512;
const SLOW = 150; // milliseconds

class Session extends Looking {
  models = $state.raw<ModelEntry[]>([]);
  card = $state.raw<ModelCard | null>(null);

  shown = $state.raw<Shown | null>(null);
  ghost = $state.raw<Shown | null>(null);
  /** A pass that has just come: for one frame the flow alone draws it, and then all of the page. */
  early = $state.raw<{ shown: Shown; ghost: Shown | null } | null>(null);
  atlas = $state.raw<Atlas | null>(null);
  busy = $state(false);
  /** Whether a pass has been under way for so long that it is worth saying. */
  slow = $state(false);
  waitedFor = $state(0);
  problem = $state.raw<{ sentence: string; kind: string } | null>(null);
  ready = $state(false);

  uniforms = $state.raw<number[]>([]);
  /** How many of the seed's numbers have been used. */
  used = $state(0);
  running = $state(false);

  dark = $state(matchMedia("(prefers-color-scheme: dark)").matches);
  colours = $derived(palette(this.dark));

  history = new History();
  said = $state("");

  distribution = $derived.by(() => {
    const s = this.shown;
    return s?.logits ? distribution(s.logits, s.order, this.settings) : null;
  });

  /** What would be drawn now; null where the model does not go on with a text. */
  drawn = $derived.by((): { id: number; uniform: number } | null => {
    const d = this.distribution;
    if (!d || this.uniforms.length === 0) return null;
    const uniform = this.uniforms[this.used % this.uniforms.length];
    return { id: draw(d, uniform), uniform };
  });

  /** The unedited run that was shown last, which the next one goes on from. */
  #plain: { run: string; model: string } | null = null;
  /** The run with these very edits that was shown last, which the next one with them goes on from. */
  #edited: { run: string; model: string; edits: string } | null = null;
  #loading = new AbortController();
  #again = false;
  /** Ends the wait for a frame, where one is waited for. */
  #hurry: () => void = () => undefined;
  #listens = false;
  #serial = 0;
  #cards = new Cards();

  /** Open the page: where the link says, or at the model that the server was started for. */
  async open(): Promise<void> {
    const place = fromHash(location.hash);
    this.take(place);
    try {
      const listed = await api.models();
      this.models = listed.models;
      const linked = listed.models.some((m) => m.name === place.model) ? place.model! : listed.default;
      this.wanted = linked;
      const state = listed.models.find((m) => m.name === linked)?.state;
      // The toy answers until the wanted model has been loaded.
      const first = state === "ready" || linked === TOY ? linked : TOY;
      await Promise.all([this.#use(first, first === linked ? place : null), this.#newSeed()]);
      if (first !== linked) void this.#await(linked, place);
      this.ready = true;
    } catch (error) {
      this.fail(error);
    }
    if (this.#listens) return;
    this.#listens = true;
    addEventListener("pagehide", () => this.#leave());
    addEventListener("pageshow", (event) => {
      if (event.persisted) void this.run(); // back from where the browser kept it: its runs have been let go of
    });
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === toHash(this.place)) return;
      this.remember("link");
      void this.restore(fromHash(location.hash));
    });
  }

  async restore(place: Place): Promise<void> {
    const seed = this.seed;
    this.take(place);
    if (seed !== place.seed) await this.#newSeed();
    if (place.model && place.model !== this.model) await this.choose(place.model, place);
    else await this.run();
  }

  /** Keep the present place, so that `undo` comes back to it. */
  remember(label: string): void {
    this.history.remember(this.place, label);
  }

  async undo(): Promise<void> {
    const back = this.history.undo(this.place);
    if (!back) return;
    this.said = `Undone: ${back.label}`;
    await this.restore(back.place);
  }

  async redo(): Promise<void> {
    const again = this.history.redo(this.place);
    if (!again) return;
    this.said = `Done again: ${again.label}`;
    await this.restore(again.place);
  }

  /** Change to a model; the page stays on the present one until the new one has been loaded. */
  async choose(name: string, place: Place | null = null): Promise<void> {
    this.wanted = name;
    await this.#await(name, place);
  }

  async #await(name: string, place: Place | null): Promise<void> {
    this.waitedFor = performance.now();
    const stop = watchModels((models) => (this.models = models));
    try {
      await this.#cards.of(name); // waits on the server until the model is there
      if (this.wanted === name) await this.#use(name, place);
      this.models = (await api.models()).models;
    } catch (error) {
      if (this.wanted === name) this.wanted = this.model;
      this.fail(error);
    } finally {
      stop();
      this.waitedFor = 0;
    }
  }

  async #use(name: string, place: Place | null): Promise<void> {
    const card = await this.#cards.of(name);
    const changed = this.model !== name;
    const before = this.card;
    this.model = name;
    this.card = card;
    if (changed) this.atlas = null;
    if (place) {
      this.take(place);
      if (place.text === null && place.ids === null) this.text = card.examples[0] ?? "";
    } else if (changed) {
      // A text that the old model's examples offered makes way for one of the new model's.
      if (this.text === "" || before?.examples.includes(this.text) || before?.name === TOY || name === TOY) {
        this.text = card.examples[0] ?? "";
      }
      this.ids = null;
      this.grown = [];
      this.edits = [];
      this.cell = null;
      this.expert = null;
      this.layer = 0;
    }
    this.pinned ??= `layers.${Math.min(this.layer, card.sizes.N - 1)}.attn.pattern`;
    await this.run();
  }

  /** Set the text of the prompt and run it. */
  async type(text: string): Promise<void> {
    this.text = text;
    this.ids = null;
    this.grown = [];
    this.used = 0;
    await this.run();
  }

  /** Run the prompt. While one pass is under way the latest wish waits; those between are dropped. */
  async run(): Promise<void> {
    if (this.busy) {
      this.#again = true;
      this.#hurry();
      return;
    }
    this.busy = true;
    const telling = setTimeout(() => (this.slow = true), SLOW);
    try {
      do {
        this.#again = false;
        await this.#pass();
      } while (this.#again);
    } finally {
      clearTimeout(telling);
      this.slow = false;
      this.busy = false;
    }
  }

  async #pass(): Promise<void> {
    const card = this.card;
    if (!card) return;
    if (this.ids === null && this.text === "") {
      this.problem = null;
      this.shown = null;
      return;
    }
    const serial = ++this.#serial;
    const { head, view } = this;
    const prompt = this.ids === null ? { prompt: this.text } : { ids: this.ids };
    // A run of the model before is let go of once nothing of it is drawn any more.
    const former = this.#plain && this.#plain.model !== card.name ? this.#plain.run : null;
    const after = this.#plain && former === null ? { after: this.#plain.run } : {};
    const plain = async (): Promise<Shown> => {
      const found = await look({ ...prompt, ...after }, card, this.layer, this.head, this.view);
      this.#plain = { run: found.manifest.run, model: card.name };
      return found;
    };
    try {
      let shown: Shown;
      let ghost: Shown | null = null;
      if (this.edits.length > 0) {
        const edits = JSON.stringify(this.edits);
        const last = this.#edited?.model === card.name && this.#edited.edits === edits ? { after: this.#edited.run } : {};
        shown = await look({ ...prompt, edits: this.edits, ...last }, card, this.layer, this.head, this.view);
        this.#edited = { run: shown.manifest.run, model: card.name, edits };
        ghost = await plain();
      } else shown = await plain();
      if (serial !== this.#serial) return;
      this.settle(card, shown.manifest.tokens.length);
      if (this.shown?.card === card && this.view === "layer" && !this.#again && !this.running) {
        this.early = { shown, ghost };
        await Promise.race([frameAfter(), new Promise<void>((go) => (this.#hurry = go))]);
      }
      this.shown = shown;
      this.ghost = ghost;
      this.early = null;
      this.problem = null;
      if (former !== null) api.leave(former);
      this.link();
      if (this.view === "heads") void this.loadAtlas();
      if (shown.layer !== this.layer || head !== this.head || view !== this.view) void this.loadLayer(); // turned on meanwhile
    } catch (error) {
      if (serial === this.#serial) this.fail(error);
    }
  }

  #leave(): void {
    for (const left of [this.#plain, this.#edited]) if (left) api.leave(left.run);
    this.#plain = this.#edited = null;
  }

  /** Draw another layer, or another head of it. */
  async loadLayer(): Promise<void> {
    const shown = this.shown;
    if (!shown) return;
    const layer = this.layer;
    const head = this.head;
    this.#loading.abort(); // who turns on before a layer has come does not wait for it
    const { signal } = (this.#loading = new AbortController());
    try {
      const flow = await flowOf(shown.manifest.run, shown.card, layer, head, this.view, signal);
      const before = this.ghost && (await flowOf(this.ghost.manifest.run, shown.card, layer, head, this.view, signal));
      if (this.shown?.manifest.run !== shown.manifest.run || this.layer !== layer || this.head !== head) return;
      this.shown = { ...this.shown, layer, flow };
      if (this.ghost && before) this.ghost = { ...this.ghost, layer, flow: before };
    } catch (error) {
      if (!signal.aborted) this.fail(error);
    }
  }

  /** All heads of the pass; of a long one layer after layer, so that it fills in as it comes. */
  async loadAtlas(): Promise<void> {
    const shown = this.shown;
    if (!shown || this.atlas?.run === shown.manifest.run) return;
    const wanted = () => this.shown?.manifest.run === shown.manifest.run && this.view === "heads";
    try {
      for await (const atlas of atlasOf(shown)) {
        if (!wanted()) return void (this.atlas = null);
        this.atlas = atlas;
      }
    } catch (error) {
      this.fail(error);
    }
  }

  goTo(layer: number, head = this.head): void {
    if (!this.card) return;
    const to = Math.min(Math.max(layer, 0), this.card.sizes.N - 1);
    const heads = layerKind(this.card, to).sizes.H;
    const moved = to !== this.layer;
    this.layer = to;
    this.head = Math.min(Math.max(head, 0), heads - 1);
    if (moved && this.pinned?.startsWith("layers.")) {
      const name = this.pinned.replace(/^layers\.\d+\./, "");
      const address = `layers.${to}.${name}`;
      this.pinned = pointCard(this.card, address) ? address : null;
    }
    this.link();
    void this.loadLayer();
  }

  show(view: View): void {
    this.view = view;
    this.link();
    if (view !== "heads") return;
    void this.loadAtlas();
    if (!this.shown?.flow.has(`layers.${this.shown.layer}.attn.head_out`)) void this.loadLayer();
  }

  /** Open a point in the inspector, and perhaps one of its cells. */
  pin(address: string | null, cell: [number, number] | null = null): void {
    this.pinned = address;
    this.cell = cell;
    this.link();
    const layer = address ? /^layers\.(\d+)\./.exec(address)?.[1] : undefined;
    if (layer !== undefined && Number(layer) !== this.layer) {
      this.layer = Number(layer);
      void this.loadLayer();
    }
  }

  pinCell(cell: [number, number] | null): void {
    this.cell = cell;
    this.link();
  }

  pickToken(position: number | null): void {
    this.token = this.token === position ? null : position;
    this.link();
  }

  /** Look at one expert of the layer, or at none. */
  pickExpert(expert: number | null): void {
    this.expert = this.expert === expert ? null : expert;
    this.link();
  }

  set(settings: Partial<Settings>): void {
    this.settings = { ...this.settings, ...settings };
    this.link();
  }

  async reseed(seed: number): Promise<void> {
    this.seed = seed;
    this.used = 0;
    await this.#newSeed();
    this.link();
  }

  async #newSeed(): Promise<void> {
    try {
      this.uniforms = await api.uniforms(this.seed, UNIFORMS);
    } catch (error) {
      this.fail(error);
    }
  }

  /** The next number of the seed: another throw for the same token. */
  reroll(): void {
    this.used += 1;
  }

  async edit(edits: Edit[], label: string): Promise<void> {
    this.remember(label);
    this.edits = edits;
    await this.run();
  }

  /** The chosen head as a point has it: key and value heads are fewer. */
  headOf(address: string): number {
    return this.card && this.shown ? headFor(this.card, address, this.head, this.shown.manifest.tokens.length) : 0;
  }

  dismiss(): void {
    this.problem = null;
  }

  fail(error: unknown): void {
    this.running = false;
    this.problem =
      error instanceof Refused
        ? { sentence: error.message, kind: error.kind }
        : { sentence: `The page failed: ${error instanceof Error ? error.message : String(error)}`, kind: "refused" };
  }
}

export const session = new Session();
