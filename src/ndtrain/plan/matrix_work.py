"""Matrix work of a model: the weights a token passes, and what of a block is done twice."""

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.numbers import along
from ndtrain.plan.setting import ATTENTION_BUDGET, Setting
from ndtrain.plan.shapes import kinds_of_layers, layer_parameters

_RECOMPUTED_BY_BUDGET = ((0.7, 0.0), (0.5, 0.08), (0.4, 0.27), (0.3, 0.35), (0.2, 0.54), (0.0, 0.7))
"""Budget of the compiler -> share of a block's forward matrix work done twice."""


def matmul_parameters(facts: ModelFacts) -> int:
    """Weights a token is multiplied with: all matrices and the head; of experts the chosen ones."""
    total = facts.vocab_size * facts.hidden_size
    for layer, count in kinds_of_layers(facts):
        for part in layer_parameters(facts, layer):
            if len(part.shape) == 2:
                total += count * part.numel
            elif len(part.shape) == 3:
                total += count * part.numel * facts.experts_per_token // facts.num_experts
    return total


def done_again(facts: ModelFacts, setting: Setting) -> float:
    """Share of a block's forward matrix work that its backward pass repeats."""
    if setting.tiled:
        return _done_again_tiled(facts, setting)
    if setting.policy == "none":
        return 0.0
    if setting.policy == "alternate":
        return 0.5
    if setting.policy == "full" or (setting.policy == "attention" and not setting.compiled):
        return 1.0 - _left_out(facts, setting)
    return along(
        _RECOMPUTED_BY_BUDGET, ATTENTION_BUDGET if setting.policy == "attention" else setting.budget
    )


def _done_again_tiled(facts: ModelFacts, setting: Setting) -> float:
    """Share of a block's matrix work that is repeated where its MLP is tiled.

    The MLP is computed again slice by slice. A block that is recomputed as a whole stops before
    it, but where a norm reads its output.
    """
    mlp = mlp_share(facts)
    if setting.policy == "full" or (setting.policy == "attention" and not setting.compiled):
        return 1.0 + (mlp if facts.family.norms_mlp_output else 0.0)
    if setting.policy == "none":
        return mlp
    budget = ATTENTION_BUDGET if setting.policy == "attention" else setting.budget
    return mlp + (1 - mlp) * along(_RECOMPUTED_BY_BUDGET, budget)


def mlp_share(facts: ModelFacts) -> float:
    """Share of the MLPs in the matrix work of all blocks."""
    attention = 0
    for layer, count in kinds_of_layers(facts):
        for part in layer_parameters(facts, layer):
            if len(part.shape) > 1 and ".mlp." not in part.name:
                attention += count * part.numel
    blocks = matmul_parameters(facts) - facts.vocab_size * facts.hidden_size
    return 1 - attention / blocks


def _left_out(facts: ModelFacts, setting: Setting) -> float:
    """Share of a block's matrix work that recomputing it does not repeat.

    The last product of a block is read by nothing in its backward pass: recomputation that sees
    single operations stops before it. A compiled block is one operation to what is outside.
    """
    if setting.compiled and not setting.recompute_inside:
        return 0.0
    width = facts.intermediate_size
    if facts.num_experts:
        width = facts.experts_per_token * facts.expert_intermediate_size
    blocks = matmul_parameters(facts) - facts.vocab_size * facts.hidden_size
    return width * facts.hidden_size * facts.num_layers / blocks
