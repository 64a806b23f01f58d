"""Checkpoints of other training programs: Megatron-LM in and out, torchtitan in.

sources         a prefixed name (megatron:DIR) → the checkpoint, opened without reading weights
inert_pickles   pickled files, read without running anything in them
dcp_files       torch.distributed.checkpoint's directories; dcp_writer writes them
megatron_*      names, places, arguments and both formats of Megatron-LM
torchtitan      names and optimizer state of torchtitan
import_state    one of them → a checkpoint
export_state    a checkpoint → Megatron-LM's torch_dist or legacy format
"""
