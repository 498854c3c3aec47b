"""Rules between the keys of the model and its adapters."""

from ndtrain.recipe.problem import Problem, both_given
from ndtrain.recipe.schema import Recipe

LORA_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_linear",
    "lora_modules_to_save",
    "lora_model_dir",
    "peft_use_rslora",
    "peft_use_dora",
    "peft_init_lora_weights",
    "loraplus_lr_ratio",
)

STARTS = (True, False, "gaussian", "orthogonal")
"""Initial values of adapters that depend on the seed alone."""


def model_given_once(recipe: Recipe) -> Problem | None:
    """Exactly one of `base_model` and `model_config` says which model is trained."""
    if recipe.base_model is not None and recipe.model_config_ is not None:
        return both_given("model_config", "base_model")
    if recipe.base_model is None and recipe.model_config_ is None:
        return Problem(
            ("base_model",),
            "no model is given.",
            "Write a hub id, a folder, a .gguf file or package://<python package>/<file>.",
        )
    return None


def config_names_its_architecture(recipe: Recipe) -> Problem | None:
    """`model_config` has a `model_type`, transformers' word for the architecture."""
    config = recipe.model_config_
    if config is not None and not isinstance(config.get("model_type"), str):
        return Problem(("model_config",), "model_type is missing.", "Write for example llama.")
    return None


def config_needs_a_tokenizer(recipe: Recipe) -> Problem | None:
    """A model from `model_config` has no tokenizer of its own: `tokenizer_config` names one."""
    if recipe.model_config_ is not None and recipe.tokenizer_config is None:
        return Problem(
            ("model_config",),
            "has no tokenizer of its own.",
            "Add tokenizer_config: bytes, or the name of a model.",
            also=("tokenizer_config",),
        )
    return None


def lora_keys_need_an_adapter(recipe: Recipe) -> Problem | None:
    """`lora_...` keys do nothing without `adapter`: a notice says so, since the run goes on."""
    given = [key for key in LORA_KEYS if key in recipe.model_fields_set and getattr(recipe, key)]
    if recipe.adapter is None and given:
        others = f" ({len(given)} such keys)" if len(given) > 1 else ""
        return Problem(
            (given[0],),
            f"does nothing without adapter{others}; this is full fine-tuning.",
            "Add adapter: lora, or remove it.",
            also=("adapter",),
            is_notice=True,
        )
    return None


def qlora_needs_four_bits(recipe: Recipe) -> Problem | None:
    """`adapter: qlora` means a base in 4 bits: `load_in_4bit: true`."""
    if recipe.adapter == "qlora" and not recipe.load_in_4bit:
        return Problem(
            ("adapter",),
            "qlora needs load_in_4bit: true.",
            "Add it, or use adapter: lora.",
            also=("load_in_4bit",),
        )
    return None


def quantised_base_needs_an_adapter(recipe: Recipe) -> Problem | None:
    """Weights in 4 or 8 bits cannot be trained themselves: they need an adapter."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(recipe, key) and recipe.adapter is None:
            return Problem(
                (key,), "needs an adapter.", "Add adapter: qlora or lora.", also=("adapter",)
            )
    return None


def adapters_start_from_a_seed(recipe: Recipe) -> Problem | None:
    """`peft_init_lora_weights` is true, false, gaussian or orthogonal (which needs an even rank).

    Starts that decompose the base's weights (pissa, olora, mica, loftq) would change them: the
    adapter alone would no longer be the result. Others (corda, eva, lora_ga) need passes over the
    data before the first step.
    """
    start = recipe.peft_init_lora_weights
    if start not in STARTS:
        return Problem(
            ("peft_init_lora_weights",),
            f"'{start}' is not supported: it would change the base's weights or need passes over "
            "the data before the first step.",
            "Use true, false, gaussian or orthogonal, which need nothing but the seed.",
        )
    if start == "orthogonal" and recipe.lora_r % 2:
        return Problem(
            ("lora_r",),
            f"is {recipe.lora_r}, but orthogonal halves it between A and B.",
            "Use an even rank.",
            also=("peft_init_lora_weights",),
        )
    return None


def one_quantisation(recipe: Recipe) -> Problem | None:
    """A base is held in 4 bits or in 8 bits, not in both."""
    if recipe.load_in_4bit and recipe.load_in_8bit:
        return both_given("load_in_8bit", "load_in_4bit")
    return None


def adapter_targets_given_once(recipe: Recipe) -> Problem | None:
    """`lora_target_linear` means every linear: a pattern in `lora_target_modules` has no say then.

    A list of names may stand beside it: those modules are adapted too.
    """
    pattern = recipe.lora_target_modules
    if recipe.lora_target_linear and isinstance(pattern, str) and pattern != "all-linear":
        return both_given("lora_target_modules", "lora_target_linear")
    return None


def adapter_has_targets(recipe: Recipe) -> Problem | None:
    """An empty list of `lora_target_modules` adapts nothing, without `lora_target_linear`."""
    if recipe.adapter is None or recipe.lora_target_linear or recipe.lora_target_modules is None:
        return None
    if recipe.lora_target_modules:
        return None
    return Problem(
        ("lora_target_modules",),
        "names no module.",
        "Remove it for the usual ones, or write all-linear.",
        also=("lora_target_linear",),
    )
