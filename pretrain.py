"""Train a model: `torchrun --nproc-per-node N pretrain.py --config FILE.yaml [--tp N --pp N --dp N]
[--section.key VALUE …]`.

`python pretrain.py --config FILE.yaml` runs one process. `--help` lists all options, `--print_config` prints
the resolved configuration. The same as `megalite train`, implemented in megalite/commands/train.py.
"""

from megalite.commands.start import start

if __name__ == "__main__":
    start("train")
