"""The one object that people hold: a loaded model, to trace and to generate with. It only joins the rooms below."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np

from cutaway.checkpoints.load import Checkpoint, load_checkpoint, spec_of
from cutaway.checkpoints.sources import locate
from cutaway.engines import make_engine
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError
from cutaway.forward.context import warn_beyond_context
from cutaway.forward.parameters import Parameters
from cutaway.forward.pooling import Pooling
from cutaway.generate import Batch, Generation, Passes, Request, Step, all_finished, finished, loop
from cutaway.generate.choice import parted
from cutaway.generate.edited import edits_of, with_edits
from cutaway.generate.settings import (
    Basic,
    Settings,
    make_request,
    refuse_encoder,
    refuse_one_cache,
    refuse_one_prompt,
    refuse_shortcuts,
    seeds_of,
)
from cutaway.points import all_points
from cutaway.spec import Count, ModelSpec
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace import Prompt, Trace
from cutaway.trace.capture.bill import Bill
from cutaway.trace.edits.adapting import read_adapters, scaled
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.merging import as_computed, merged_checkpoint
from cutaway.trace.edits.plain import read_edits
from cutaway.trace.gradients.connecting import connected
from cutaway.trace.prompts import Given, PromptLike, Reader, fed
from cutaway.trace.running import Machine, Points, Stepping, Watching, billed, traced
from cutaway.trace.sweep.folder import SweepFolder
from cutaway.trace.sweep.sweeping import Sweeping, sweep
from cutaway.trace.texts.score import Score
from cutaway.trace.texts.scoring import Scorer, Scoring, scores
from cutaway.trace.texts.vectors import text_vectors
from cutaway.trace.verification.against import against_transformers, points_to_compare
from cutaway.trace.verification.verify import Check, verification_ids, verify

Edits = Edit | Mapping[str, Any] | str | Iterable[Edit | Mapping[str, Any] | str]


def load(source: str | Path = "smollm2-135m", engine: str = "auto", dtype: str | None = None) -> "Model":
    """Load a model by name, by path (a GGUF file, or a folder with config.json and safetensors), or "hf:owner/name".

    `engine` is "auto", "cpu", "numpy" or "torch" ("torch:cuda" names the device); `dtype` is "float32", on the numpy
    and torch engines also "float64", on torch also "bfloat16" and "float16". Raises CutawayError for what cannot be
    found, read, or computed, and says why.
    """
    chosen = make_engine(engine, dtype)
    return Model(load_checkpoint(locate(source)), chosen)


def count(source: str | Path | ModelSpec) -> Count:
    """Parameters and bytes of a configuration: a spec, a name of the catalog, a config.json, a folder, a GGUF file.

    No weights are needed or read. Raises CutawayError for what is unknown or cannot be.
    """
    if not isinstance(source, str | Path | ModelSpec):
        raise CutawayError(f"A configuration is a spec, a name or a path, not {type(source).__name__}: {source!r}.")
    return (source if isinstance(source, ModelSpec) else spec_of(source)).count()


class Model:
    """A spec, its weights, a tokenizer and an engine. Safe to use from several threads at once."""

    def __init__(self, checkpoint: Checkpoint, engine: Engine) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.engine = engine
        self.origin = checkpoint.location.origin
        self.path = checkpoint.location.path
        self.parameters = Parameters(self.spec, checkpoint.weights, engine)
        self._checkpoint = checkpoint
        self._reader = Reader(self.spec, checkpoint.tokenizer)

    def __repr__(self) -> str:
        return (
            f"<Model {self.spec.name}: {self.spec.count().total:,} parameters in {self.spec.n_layers} layers, "
            f"{self.engine.name} engine, {self.engine.dtype.name}>"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Text ↔ ids. Raises CutawayError where the checkpoint came without one."""
        return self._reader.required()

    def piece(self, token: int) -> str:
        """How a token reads; by its number where the tokenizer knows it not, as in an embedding padded past it."""
        return self._reader.piece(token)

    @property
    def points(self) -> list[str]:
        """Every address that this model has, in the order of the pass; then those of the choice of a token."""
        return [str(point) for point in all_points(self.spec)]

    def prompt(self, prompt: PromptLike) -> Prompt:
        """What would be run for `prompt`: its ids, how each token reads, and what tokenizing added.

        Raises CutawayError for what cannot be run: an empty or too long prompt, an id outside the vocabulary.
        """
        return self._reader.read(prompt)

    def trace(
        self,
        prompt: PromptLike,
        points: Points = None,
        positions: Sequence[int] | None = None,
        types: Sequence[int] | np.ndarray | None = None,
        *,
        heads: Sequence[int] | None = None,
        edits: Edits = (),
        limit: int | None = None,
        spill: str | Path | None = None,
        gradients: bool = False,
    ) -> Trace:
        """Run the forward pass over `prompt` (text, ids, or vectors `[T, d]`) and keep what was asked for.

        `points` are addresses or patterns ("layers.*.attn.pattern", "layers.5:8.resid_post"), functions of a point, or
        reductions ("layers.*.attn.pattern | top(5)"); None keeps the summary: every stream, what is added to it, and
        all attention. `positions` keeps only these rows, `heads` only these query heads, and of keys
        and values those that serve them (an edit counts a point's own heads). `edits` change what is computed
        (`cutaway.edits`); `trace.edits` tells what each did. What is kept must fit into `limit` bytes (None: half of
        the free memory; `plan` tells the bill), or is kept in the new file `spill`. `types` tell the sentences of a
        pair apart, one number for each token, in models that know such kinds (BERT). With `gradients` (torch engine)
        the values stay connected: see `trace.backward`. Raises CutawayError for an empty prompt, one longer than
        learned positions reach, an id outside the vocabulary, an unknown point, an edit that fires nowhere, a capture
        over the limit. A prompt longer than the model was made for (`spec.context_length`) runs where positions are
        rotary, with a UserWarning.
        """
        told, asked = self._asked(prompt, points, positions, types, heads, edits, limit, spill)
        warn_beyond_context(self.spec, 0, len(told.ids))
        if gradients:
            return connected(self._machine, told, asked)
        return traced(self._machine, told, asked)

    def plan(
        self,
        prompt: PromptLike,
        points: Points = None,
        positions: Sequence[int] | None = None,
        *,
        heads: Sequence[int] | None = None,
        edits: Edits = (),
    ) -> Bill:
        """What `trace` would keep for these, array by array, and what it would cost; nothing runs.

        Print it with `.show()`; `.bytes` is the sum. Raises CutawayError as `trace` does.
        """
        told, asked = self._asked(prompt, points, positions, None, heads, edits)
        return billed(self._machine, told, asked)

    @overload
    def sweep(
        self, prompts: Any, points: Points = None, *, to: None = None, **settings: Unpack[Sweeping]
    ) -> Iterator[Any]: ...

    @overload
    def sweep(
        self, prompts: Any, points: Points = None, *, to: str | Path, **settings: Unpack[Sweeping]
    ) -> SweepFolder: ...

    def sweep(
        self, prompts: Any, points: Points = None, *, to: str | Path | None = None, **settings: Unpack[Sweeping]
    ) -> Iterator[Any] | SweepFolder:
        """Run many prompts, packed, and give the trace of each, in order; what `trace` gives of it alone.

        `prompts` are a list, an iterator, or the name of a file (.jsonl, or text with one on each line), each what
        `trace` takes, vectors too; `types` are one list for each prompt, or None. `points`, `positions`, `heads`,
        `edits` and `limit` are those of `trace`. `reduce` is a reduction for all points ("mean"),
        or a function that makes a dict of numbers and arrays of a trace; then these are given. Passes hold up to
        `tokens_per_pass` tokens (512 on the cpu engine, elsewhere 2,048).

        With `to` the results go to files of that folder, which is returned: in constant memory, and run again after
        being killed it goes on where it was. Files hold about `shard_tokens` tokens (16,384); `layout` is "prompts",
        "rows" (`[tokens, d]` for dictionary learning) or "table" (Parquet, numbers only), `dtype` that of the floats.
        Raises CutawayError as `trace` does, naming the prompt, and for a folder that holds something else.
        """
        return sweep(self._machine, self.prompt, prompts, points, to, settings, self._edits(settings.get("edits", ())))

    def score(self, text: PromptLike, **settings: Unpack[Scoring]) -> Score:
        """How likely the model finds each token of a text, given those before it; see `scores`."""
        return next(self.scores([text], **settings))

    def scores(self, texts: Any, **settings: Unpack[Scoring]) -> Iterator[Score]:
        """The log-probability of each token of many texts (a list, an iterator, or a file as in `sweep`), packed.

        In float64, exactly normalised; a text gets the same in any company. A text longer than `context` tokens (those
        that the model was made for) is read in windows of that many, which move on by `stride` (half of them): every
        token is scored once, with at least `context - stride` tokens before it, from the second window on.
        `against` another model of the same vocabulary gives the Kullback-Leibler divergence of each prediction too.
        Raises CutawayError for encoders, and as `trace` does, naming the text.
        """
        other = settings.get("against")
        if other is not None and not isinstance(other, Model):
            raise CutawayError(f"against is a model as cutaway.load gives it, not {type(other).__name__}.")
        pair = None if other is None else other._scorer
        return scores(self._scorer, texts, settings.get("context"), settings.get("stride"), pair)

    def embed(self, texts: Sequence[PromptLike], *, pooling: Pooling = "mean", unit: bool = False) -> np.ndarray:
        """One vector for each text (or list of ids), `[n, d]`: the mean of its tokens' last rows, or the first row.

        What sentence encoders are for; any model has such rows. Texts of unequal lengths are packed, not padded, so
        each gets the same vector in whatever company. With `unit` every vector has length 1. Raises CutawayError
        as `trace` does, naming the text.
        """
        return text_vectors(self._machine, self.prompt, texts, pooling, unit=unit)

    def generate(
        self,
        prompt: PromptLike,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        points: Points = (),
        edits: Edits = (),
        **settings: Unpack[Settings],
    ) -> Generation:
        """Continue `prompt` and return the whole response; the settings are those of `stream`."""
        basic = Basic(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
        changed = self._edits(edits)
        request, steps = self._continue(prompt, basic, settings, points, changed)
        return finished(request, steps, (self.spec, self.engine.dtype.name), keep_steps=bool(points or changed))

    def generate_many(
        self,
        prompts: Sequence[PromptLike],
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop: Sequence[str] = (),
        at_once: int = 8,
        edits: Edits | Sequence[Edits | None] = (),
        **settings: Unpack[Settings],
    ) -> list[Generation]:
        """Continue several prompts in shared passes, `at_once` at a time; each gets what it would get alone.

        `seed` is one for each prompt, or a number, and then prompt i has seed + i. `edits` act in each response, at its
        own positions; a list of lists has one list for each prompt. `edits` of a response tells what they did there.
        The other settings are those of `stream` and hold for all. Raises CutawayError as `stream` does, naming the
        prompt.
        """
        requests = []
        refuse_one_cache(settings)
        refuse_one_prompt(prompts)
        changed = edits_of(edits, len(prompts), self._edits)
        for index, own in enumerate(seeds_of(seed, len(prompts))):
            try:
                basic = Basic(max_tokens, temperature, top_k, top_p, min_p, own, stop)
                requests.append(self.request(prompts[index], basic, settings, changed[index]))
            except CutawayError as error:
                raise CutawayError(f"Prompt {index}: {error}") from None
        return all_finished(self.batch(at_once), requests)

    def stream(
        self,
        prompt: PromptLike,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        points: Points = (),
        edits: Edits = (),
        **settings: Unpack[Settings],
    ) -> Iterator[Step]:
        """Continue `prompt` token by token; each step holds the token, the text that may be shown, its log-probability.

        By default tokens are drawn from the model's own distribution; `temperature` 0 always takes the
        likeliest. `seed` makes the draws repeatable. It ends after `max_tokens`, at the model's own end token, at
        any of the `stop` strings (left out of the text), or where learned positions end; past `spec.context_length`
        it goes on with a UserWarning. With `points` or `edits`, each `step.trace` holds the rows that the step's pass
        computed; edits act in every pass, at the positions of the whole text, and keys and values are cached as edited.
        `generate.Settings` lists what else can be said. Wrong settings raise CutawayError at the call.
        """
        basic = Basic(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
        return self._continue(prompt, basic, settings, points, self._edits(edits))[1]

    def request(self, prompt: PromptLike, basic: Basic, settings: Settings | None = None, edits: Edits = ()) -> Request:
        """What `basic` and `settings` ask for, checked: what a `batch` takes. Raises CutawayError as `stream` does."""
        ids, told = self.prompt(prompt).ids, settings or {}
        refuse_encoder(self.spec)
        made = make_request(self.spec, self._reader.tokenizer, ids, told, basic)
        return with_edits(made, told, self._edits(edits), self._machine)

    def batch(self, at_once: int = 8, waiting: int | None = None, retained: int = 0, *, shown: bool = False) -> Batch:
        """An empty running batch of this model, for requests that come and go (`generate.batch.Batch`)."""
        passes = Passes(self.engine, self.spec, self.parameters)
        return Batch(passes, self._reader.tokenizer, at_once=at_once, waiting=waiting, retained=retained, shown=shown)

    def merged(self, adapters: Any, scale: float = 1.0) -> "Model":
        """Another model on the same engine: this one with LoRA adapters in its weights, W + scale · B · A.

        `adapters` is a folder as PEFT saves it, an `edits.Adapter`, or a list of them, which are summed. Each changed
        matrix is made in float32 (`origin` tells the bytes); the others stay mapped, but the torch engine holds its
        own copy of every one. This model stays as it is. Raises CutawayError for what cannot be honoured.
        """
        return Model(
            merged_checkpoint(self._checkpoint, self.parameters, self.engine, scaled(adapters, scale)), self.engine
        )

    def verify(self, prompt: PromptLike | None = None) -> Iterator[Check]:
        """Check the identities that hold of every pass, on this model; one result after another."""
        ids = self.prompt(prompt).ids if prompt is not None else verification_ids(self.spec)
        return verify(self.engine, self.spec, self.parameters, ids)

    def compare(self, prompt: PromptLike | None = None) -> Iterator[Check]:
        """Run the same checkpoint in transformers and compare layer by layer; one result per point, in order.

        Raises CutawayError where transformers is not installed or cannot read the checkpoint.
        """
        if self._checkpoint.merged:
            raise CutawayError(f"{self.path} lacks what was merged in here: {', '.join(self._checkpoint.merged)}.")
        told = self.prompt(verification_ids(self.spec) if prompt is None else prompt)
        return against_transformers(traced(self._machine, told, Watching(points_to_compare(self.spec))), self.path)

    def _continue(
        self, prompt: PromptLike, basic: Basic, settings: Settings, points: Points, edits: tuple[Edit, ...]
    ) -> tuple[Request, Iterator[Step]]:
        """What is asked for, and the steps that continue the prompt, none of which has run."""
        request = self.request(prompt, basic, settings)
        if points is None:
            raise CutawayError("points is None; a generation keeps what is named, as in ['layers.*.attn.pattern'].")
        watched = callable(points) or bool(points)
        if not watched and not edits:
            batch = self.batch(1, shown=True)
            return request, batch.steps(batch.submit(request, cache=settings.get("cache") or None))
        refuse_shortcuts(request, settings)
        of_pass, request = parted(points, request, self.spec)
        stepping = Stepping(self._machine, request.ids, Watching(of_pass, edits=edits), self._reader.pieces)
        return request, stepping.told(loop(stepping.advance, request, self._reader.tokenizer, stepping.room))

    def _edits(self, edits: Any) -> tuple[Edit, ...]:
        return read_adapters(read_edits(edits), as_computed(self._checkpoint, self.parameters, self.engine))

    @property
    def _machine(self) -> Machine:
        piece = self.piece if self._reader.tokenizer is not None else None
        return Machine(self.engine, self.spec, self.parameters, piece)

    @property
    def _scorer(self) -> Scorer:
        return Scorer(self._machine, partial(self._reader.read, any_length=True), self._reader.tokenizer)

    def _asked(
        self,
        prompt: PromptLike,
        points: Points,
        positions: Sequence[int] | None,
        types: Sequence[int] | np.ndarray | None,
        heads: Sequence[int] | None,
        edits: Edits,
        limit: int | None = None,
        spill: str | Path | None = None,
    ) -> tuple[Prompt, Watching]:
        told = fed(Given(prompt, types), self.spec, self.prompt)
        changed = self._edits(edits)
        return told.prompt, Watching(points, positions, heads, told.types, told.vectors, limit, spill, changed)
