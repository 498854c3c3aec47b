"""Recipe keys that say what is trained on: datasets, chat templates, lengths and packing."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ndtrain.recipe.base import MAX_SEED, RecipePart

TurnRule = Literal["all", "turn", "last", "none"]


class InstructionMapping(RecipePart):
    """`type:` as a mapping: which fields make up an instruction row and how they are joined."""

    system_prompt: str = Field("", description="System text used when a row has none.")
    system_format: str = Field("{system}", description="How the system text is written.")
    field_system: str = Field("system", description="Column of the system text.")
    field_instruction: str = Field("instruction", description="Column of the instruction.")
    field_input: str = Field("input", description="Column of the optional input.")
    field_output: str = Field("output", description="Column of the answer, which is trained.")
    format: str = Field(
        "{instruction} {input}", description="Prompt for rows with an input; \\n allowed."
    )
    no_input_format: str = Field("{instruction}", description="Prompt for rows without an input.")


class DatasetSpec(RecipePart):
    """One source of rows."""

    path: str = Field(
        description="File, folder, hub id, package://<python package>/<file>, or `synthetic`."
    )
    type: str | InstructionMapping | None = Field(
        "chat_template",
        description="Row format: alpaca, chat_template, sharegpt, completion, input_output, or a "
        "mapping of instruction fields; null = already tokenised.",
    )
    name: str | None = Field(None, description="Hub configuration name.")
    split: str = Field(
        "train", description="Split of a hub dataset, or of a folder whose names carry splits."
    )
    revision: str | None = Field(None, description="Hub branch, tag or commit.")
    data_files: tuple[str, ...] | str | None = Field(None, description="Files inside the source.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = Field(
        None,
        description="File kind, of a folder the only one read; default: by suffix and content.",
    )
    field: str = Field("text", description="Column of completion rows.")
    field_messages: str | None = Field(
        None, description="Column of the turns; default: messages, else conversations."
    )
    message_property_mappings: dict[str, str] | None = Field(
        None, description="{role: column, content: column}; default: detected."
    )
    roles: dict[str, tuple[str, ...]] | None = Field(
        None, description="{target role: [names in the data]}."
    )
    roles_to_train: tuple[str, ...] = Field(("assistant",), description="Whose turns are trained.")
    train_on_eos: TurnRule = Field(
        "turn", description="Which end-of-turn tokens are trained: all, turn (trained turns), last."
    )
    message_field_training: str = Field(
        "train", description="Per-message switch that overrides roles_to_train."
    )
    drop_system_message: bool = Field(False, description="Leave system turns out.")
    chat_template: str | None = Field(None, description="Template for this dataset only.")
    chat_template_jinja: str | None = Field(
        None, description="Jinja text or file; alone, this dataset's template."
    )
    field_tools: str = Field("tools", description="Column of tool definitions.")
    field_thinking: str = Field("reasoning_content", description="Key of reasoning text in a turn.")
    weight: float | None = Field(
        None, gt=0, description="Share of this dataset in the mixture, relative to the others."
    )
    samples: int | None = Field(None, ge=1, description="Exactly so many rows of this dataset.")
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="What happens to a row that cannot be used; skipped rows are counted."
    )
    length: int = Field(1000, ge=1, description="Rows of a synthetic dataset.")
    sequence_length: int = Field(512, ge=2, description="Tokens of a synthetic row.")
    min_input_id: int = Field(100, ge=0, description="Smallest synthetic token id.")
    max_input_id: int | None = Field(None, ge=0, description="Largest synthetic token id.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Seed of a synthetic dataset.")


class PretrainingSpec(RecipePart):
    """A stream of raw text for continued pre-training; needs max_steps."""

    path: str = Field(description="File, folder or hub id.")
    name: str | None = Field(None, description="Hub configuration name.")
    split: str = Field(
        "train", description="Split of a hub dataset, or of a folder whose names carry splits."
    )
    text_column: str = Field("text", description="Column of the text.")
    data_files: tuple[str, ...] | str | None = Field(None, description="Files inside the source.")
    skip: int = Field(0, ge=0, description="Rows to leave out at the start.")
    type: Literal["pretrain"] = Field("pretrain", description="Always pretrain.")


class DataKeys(RecipePart):
    """Datasets and how rows become fixed-length token rows."""

    datasets: tuple[DatasetSpec, ...] = Field((), description="Sources of training rows.")
    test_datasets: tuple[DatasetSpec, ...] = Field((), description="Sources of evaluation rows.")
    pretraining_dataset: tuple[PretrainingSpec, ...] = Field(
        (), description="Streams of raw text instead of datasets."
    )
    val_set_size: float = Field(
        0.0, ge=0, description="Rows held out for evaluation: a share below 1, or a count."
    )
    dataset_prepared_path: str | None = Field(None, description="Cache of tokenised rows.")
    dataset_num_proc: int | None = Field(None, ge=1, description="Tokenising processes.")
    shuffle_merged_datasets: bool = Field(True, description="Shuffle rows anew each epoch.")
    dataset_exact_deduplication: bool = Field(False, description="Drop rows that occur twice.")
    train_on_inputs: bool = Field(False, description="Train the prompt too.")
    chat_template: str = Field(
        "tokenizer_default",
        description="tokenizer_default, chatml, llama3, qwen, gemma, mistral or jinja.",
    )
    chat_template_jinja: str | None = Field(None, description="Jinja text or file, for `jinja`.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables handed to the template."
    )
    default_system_message: str | None = Field(None, description="System turn for rows without.")
    sequence_len: int = Field(2048, ge=2, description="Longest row in tokens.")
    eval_sequence_len: int | None = Field(None, ge=2, description="The same for evaluation.")
    excess_length_strategy: Literal["drop", "truncate", "split", "raise"] = Field(
        "drop", description="What happens to longer rows; the counts are shown."
    )
    min_sample_len: int = Field(2, ge=2, description="Shorter rows are dropped and counted.")
    sample_packing: bool = Field(
        False, description="Several documents share one row, unseen by each other."
    )
    eval_sample_packing: bool | None = Field(None, description="The same for evaluation rows.")
    pad_to_sequence_len: bool | None = Field(
        None, description="Pad every row to sequence_len; default: only packed rows."
    )
    pad_to_multiple_of: int = Field(64, ge=1, description="Padding granularity of unpacked rows.")
    balance_by_attention: bool = Field(
        False, description="Deal packed rows so that ranks get equal attention work."
    )
    dataloader_num_workers: int = Field(0, ge=0, description="Processes that assemble batches.")
    dataloader_pin_memory: bool | None = Field(None, description="Pinned copies; default: CUDA.")
    dataloader_prefetch_factor: int = Field(2, ge=1, description="Steps assembled ahead.")
    preprocessing_seed: Annotated[
        int | None, Field(ge=0, le=MAX_SEED, description="Seed of splits; default: seed.")
    ] = None
