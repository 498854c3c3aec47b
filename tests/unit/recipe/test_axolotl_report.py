from pathlib import Path

from ndtrain.recipe.axolotl_report import report_axolotl

TEXT = """\
base_model: owner/name
learning_rate: 2e-6
flash_attention: true
sequence_parallel_degree: 2
deepspeed: zero3.json
learning_rte: 3
datasets:
  - path: owner/rows
    type: alpaca
    shards: 4
warmup_steps: 3
warmup_ratio: 0.1
"""


def test_every_key_has_a_verdict_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(TEXT)
    rows = report_axolotl(path)
    assert [
        (row.where.rpartition(":")[0][-2:].strip(":"), row.key, row.verdict) for row in rows
    ] == [
        ("1", "base_model", "same"),
        ("2", "learning_rate", "same"),
        ("3", "flash_attention", "adapted"),
        ("4", "sequence_parallel_degree", "adapted"),
        ("5", "deepspeed", "stops"),
        ("6", "learning_rte", "stops"),
        ("8", "datasets[0].path", "same"),
        ("9", "datasets[0].type", "same"),
        ("10", "datasets[0].shards", "stops"),
        ("11", "warmup_steps", "same"),
        ("12", "warmup_ratio", "stops"),
    ]
    assert all(row.text for row in rows if row.verdict != "same")
