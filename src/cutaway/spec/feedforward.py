"""The feed-forward network, and the mixture of experts that may stand in its place (chapters 11 and 13.5)."""

from dataclasses import dataclass
from typing import Literal, get_args

from cutaway.spec.check import require, require_positive

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True)
class FeedForwardSpec:
    """down(φ(up x)), or down(φ(gate x) · up x) where `gated` (SwiGLU, GeGLU)."""

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require(self.activation in ACTIVATIONS, "activation", self.activation, f"one of {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighed.

    The scores are the softmax or the sigmoid of the router's logits. `n_active` experts are chosen by score, plus,
    where `correction` says so, a learned bias that the gates never see. With `n_groups` only the best `top_groups`
    groups are in the running, a group being worth the sum of its best two biased scores, or, with `group_best`
    "one", its best. Gates are the chosen scores, divided by their sum where `renormalise`, times `scale`; with
    `gate_input` they multiply what the expert reads and not what it gives.
    """

    n_active: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_best: Literal["one", "two"] = "two"
    correction: bool = False
    gate_input: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "n_active", "n_groups", "top_groups")
        require(self.scores in ("softmax", "sigmoid"), "router's scores", self.scores, "'softmax' or 'sigmoid'")
        require(self.top_groups <= self.n_groups, "top_groups", self.top_groups, f"at most n_groups = {self.n_groups}")


@dataclass(frozen=True)
class ExpertsSpec:
    """A router and `n_experts` feed-forwards of one shape, of which each token uses a few; and perhaps a shared one."""

    n_experts: int
    expert: FeedForwardSpec
    router: RouterSpec
    shared: FeedForwardSpec | None = None

    def __post_init__(self) -> None:
        require_positive(self, "n_experts")
        router = self.router
        require(router.n_active <= self.n_experts, "n_active", router.n_active, f"at most n_experts = {self.n_experts}")
        require(
            self.n_experts % router.n_groups == 0,
            "n_groups",
            router.n_groups,
            f"a divisor of n_experts = {self.n_experts}",
        )
        in_running = self.n_experts // router.n_groups * router.top_groups
        require(
            router.n_active <= in_running, "n_active", router.n_active, f"at most the {in_running} in the top groups"
        )
        require(not self.expert.bias, "bias of an expert", self.expert.bias, "left out")
