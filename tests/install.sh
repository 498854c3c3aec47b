#!/usr/bin/env bash
# `make test-install`: wheel and sdist, each in a clean environment, outside the checkout: copy a
# recipe, train two steps, look at what came out. Takes minutes and needs a package index.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model='{model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, intermediate_size: 64, vocab_size: 300}'

path=$PATH
python3 -m venv "$work/builder"
"$work/builder/bin/python" -m pip install -q build
"$work/builder/bin/python" -m build --outdir "$work/dist" "$root" > "$work/build.log"

for package in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
  echo "== $(basename "$package")"
  place="$work/$(basename "$package").d"
  python3 -m venv "$place/venv"
  # torch first: with it in place, pip keeps the build that fits this machine.
  "$place/venv/bin/python" -m pip install -q -c "$root/constraints.txt" torch==2.13.0
  "$place/venv/bin/python" -m pip install -q -c "$root/constraints.txt" "$package"
  cd "$place"
  export PATH="$place/venv/bin:$path" XDG_CACHE_HOME="$place/cache"
  unset PYTHONPATH
  ndtrain recipes copy quickstart
  ndtrain train quickstart.yaml --max-steps 2 --set base_model=null --set tokenizer_config=bytes \
    --set device=cpu --set model_config="$model"
  test -s runs/quickstart/report.html
  python -c 'import transformers as t; t.AutoModelForCausalLM.from_pretrained("runs/quickstart/export")'
  ndtrain generate runs/quickstart --prompt "What does the cp axis do?" --max-new-tokens 4
  cd "$root"
  rm -rf "$place"
done
echo "Both install and run."
