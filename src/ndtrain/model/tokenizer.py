"""The tokenizer of a run: the base model's, another model's or the built-in byte-level one."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndtrain.errors import MeshError
from ndtrain.model.gguf_cache import converted_tokenizer
from ndtrain.model.ready import tokenizer_folder
from ndtrain.plan.model_source import ModelSource, find_address
from ndtrain.recipe.schema import Recipe, SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(source: ModelSource, recipe: Recipe) -> "PreTrainedTokenizerBase":
    """The tokenizer that `recipe` asks for, with its special and ordinary tokens added.

    Raises:
        MeshError: there is none, or it cannot be read.
    """
    tokenizer = _find_tokenizer(source, recipe)
    if recipe.special_tokens is not None:
        tokenizer.add_special_tokens(
            _role_tokens(recipe.special_tokens), replace_extra_special_tokens=False
        )
    if recipe.tokens:
        tokenizer.add_tokens(list(recipe.tokens))
    if tokenizer.pad_token is None:
        # Padding is masked by position, so any existing token serves and none needs adding.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def tokenizer_key(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of everything that decides which ids a text gets: vocabulary, merges, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(_sorted_vocabulary(tokenizer))
    parts = [
        words,
        json.dumps(tokenizer.chat_template, sort_keys=True, default=str),
        json.dumps({role: str(getattr(tokenizer, role)) for role in _ROLES}),
        json.dumps(sorted(str(token) for token in tokenizer.all_special_tokens)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_tokenizer(
    source: ModelSource, *, trust_remote_code: bool = False, where: str = "base_model"
) -> "PreTrainedTokenizerBase":
    """The tokenizer that comes with a model.

    Args:
        source: the model; of one on the hub, its small files are downloaded.
        trust_remote_code: run code that comes with it.
        where: how messages call the place of its name.

    Raises:
        MeshError: the model has none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if source.kind == "random":
        from ndtrain.model.byte_tokenizer import build_byte_tokenizer

        return build_byte_tokenizer()
    if source.kind == "gguf":
        return converted_tokenizer(source)
    folder = source.path
    if folder is None:
        folder = tokenizer_folder(source, trust_remote_code=trust_remote_code, where=where)
    if not has_tokenizer(folder):
        raise MeshError(
            f"the model '{source.name}' brings no tokenizer.",
            where=str(folder),
            hint="Set tokenizer_config to a model that has one, or to bytes.",
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MeshError(
            f"the tokenizer of '{source.name}' cannot be loaded: {reason.rstrip('.')}.",
            where="tokenizer_config",
            hint="Set tokenizer_config to a model that has one, or to bytes.",
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds tokenizer files."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _find_tokenizer(source: ModelSource, recipe: Recipe) -> "PreTrainedTokenizerBase":
    if recipe.tokenizer_config == "bytes":
        from ndtrain.model.byte_tokenizer import build_byte_tokenizer

        return build_byte_tokenizer()
    where = "base_model" if recipe.tokenizer_config is None else "tokenizer_config"
    if recipe.tokenizer_config is not None:
        folder = Path(recipe.tokenizer_config).expanduser()
        if (folder / "tokenizer_config.json").is_file():
            # a tokenizer needs no model beside it
            source = ModelSource("folder", recipe.tokenizer_config, folder.absolute())
        else:
            source = find_address(recipe.tokenizer_config, where=where)
    return read_tokenizer(source, trust_remote_code=recipe.trust_remote_code, where=where)


def _role_tokens(tokens: SpecialTokens) -> Mapping[str, Any]:
    named: dict[str, Any] = {
        role: getattr(tokens, role) for role in _ROLES if getattr(tokens, role) is not None
    }
    if tokens.additional_special_tokens:
        named["extra_special_tokens"] = list(tokens.additional_special_tokens)
    return named


def _sorted_vocabulary(tokenizer: "PreTrainedTokenizerBase") -> list[tuple[str, int]]:
    return sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
