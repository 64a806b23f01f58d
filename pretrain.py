"""Train a model: `torchrun --nproc-per-node N pretrain.py --config FILE.yaml [--tp N --pp N --dp N] [--section.key VALUE …]`.

`python pretrain.py --config FILE.yaml` is one process. `--help` lists every option, `--print_config` prints the resolved configuration.
The same as `megalite train`; megalite/commands/train.py is what runs.
"""

from megalite.commands.start import start

if __name__ == "__main__":
    start("train")
