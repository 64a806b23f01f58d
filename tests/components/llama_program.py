"""What llama.cpp computes from GGUF files: run by the interpreter of the environment `llama`, without this checkout.

It reads one JSON list of jobs from stdin, {path, rows, generate, texts}, and writes one line of JSON for each: the
logits of all positions of each row of token ids, the tokens that greedy decoding adds to the first row, and the ids of
each text; or the error. The cache is in fp32. llama.cpp is called through its C interface, which xllamacpp's library
exports.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from typing import Any

import xllamacpp

LOGGED: list[str] = []
P, I32, U32, F, B = c.c_void_p, c.c_int32, c.c_uint32, c.c_float, c.c_bool
F32, WARNING = 0, 3  # ggml_type, ggml_log_level
CONTEXT = 256
CALLBACK = c.CFUNCTYPE(None, c.c_int, c.c_char_p, P)


def struct(name: str, **fields: Any) -> Any:
    return type(name, (c.Structure,), {"_fields_": list(fields.items())})


Model = struct(
    "Model",
    **{
        "devices": P,
        "buffers": P,
        "n_gpu_layers": I32,
        "split": I32,
        "load_mode": I32,
        "lazy_mode": I32,
        "main_gpu": I32,
    },
    **{"tensor_split": P, "progress": P, "progress_data": P, "overrides": P},
    **dict.fromkeys(("vocab_only", "check", "extra_buffers", "no_host", "no_alloc", "load_mtp"), B),
)
Context = struct(
    "Context",
    **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs", "n_outputs_seq"), U32),
    **dict.fromkeys(("n_threads", "n_threads_batch", "type", "rope", "pooling", "attention", "flash_attn"), I32),
    **dict.fromkeys(("freq_base", "freq_scale", "ext", "attn", "beta_fast", "beta_slow"), F),
    **{"orig_ctx": U32, "defrag": F, "eval": P, "eval_data": P, "type_k": I32, "type_v": I32, "cache_size": c.c_size_t},
    **{"abort": P, "abort_data": P},
    **dict.fromkeys(("embeddings", "offload", "no_perf", "op_offload", "swa_full", "kv_unified"), B),
    **{"samplers": P, "n_samplers": c.c_size_t, "other": P},
)
Batch = struct(
    "Batch",
    **{"n_tokens": I32, "token": c.POINTER(I32), "embd": P, "pos": c.POINTER(I32), "n_seq_id": c.POINTER(I32)},
    **{"seq_id": c.POINTER(c.POINTER(I32)), "logits": c.POINTER(c.c_int8)},
)


def library() -> Any:
    lib = c.CDLL(xllamacpp.xllamacpp.__file__)
    types = {
        "model_default_params": (Model,),
        "context_default_params": (Context,),
        "model_load_from_file": (P, c.c_char_p, Model),
        "init_from_model": (P, P, Context),
        "model_get_vocab": (P, P),
        "vocab_n_tokens": (I32, P),
        "batch_init": (Batch, I32, I32, I32),
        "batch_free": (None, Batch),
        "decode": (I32, P, Batch),
        "get_logits_ith": (c.POINTER(F), P, I32),
        "tokenize": (I32, P, c.c_char_p, I32, c.POINTER(I32), I32, B, B),
        "free": (None, P),
        "model_free": (None, P),
        "log_set": (None, CALLBACK, P),
    }
    for name, (result, *arguments) in types.items():
        function = getattr(lib, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    params = lib.llama_context_default_params()
    shown = params.n_ctx, params.n_batch, params.n_ubatch, params.type_k, params.type_v, params.n_samplers
    assert shown == (512, 2048, 512, 1, 1, 0), f"the parameters of this version have another layout: {shown}"
    return lib


def made(pointer: int | None) -> int:
    if not pointer:
        raise RuntimeError("".join(LOGGED))
    return pointer


def context(lib: Any, model: int) -> int:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = F32
    params.flash_attn = 0
    return made(lib.llama_init_from_model(model, params))


def decoded(lib: Any, ctx: int, vocabulary: int, tokens: list[int], start: int = 0) -> list[list[float]]:
    """Logits at each of some tokens that follow those in the cache."""
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, 1
        batch.seq_id[i][0] = 0
    failed = lib.llama_decode(ctx, batch)
    lib.llama_batch_free(batch)
    if failed:
        raise RuntimeError(f"llama_decode returns {failed}: {''.join(LOGGED)}")
    return [lib.llama_get_logits_ith(ctx, i)[:vocabulary] for i in range(len(tokens))]


def answer(lib: Any, job: dict[str, Any]) -> dict[str, Any]:
    LOGGED.clear()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = made(lib.llama_model_load_from_file(job["path"].encode(), params))
    vocab = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocab)
    logits: list[list[list[float]]] = []
    generated: list[int] = []
    for row in job.get("rows", ()):
        ctx = context(lib, model)
        logits.append(decoded(lib, ctx, size, row))
        if len(logits) == 1:
            last = logits[0][-1]
            for position in range(len(row), len(row) + job.get("generate", 0)):
                generated.append(max(range(size), key=last.__getitem__))
                last = decoded(lib, ctx, size, generated[-1:], position)[-1]
        lib.llama_free(ctx)
    ids = []
    for text in job.get("texts", ()):
        content = text.encode()
        room = 4 * len(content) + 16
        tokens = (I32 * room)()
        number = lib.llama_tokenize(vocab, content, len(content), tokens, room, job.get("whole", False), True)
        ids.append(tokens[:number])
    lib.llama_model_free(model)
    return {"logits": logits, "generated": generated, "ids": ids, "vocabulary": size}


def main() -> None:
    lib = library()

    def keep(level: int, text: bytes | None, _: Any) -> None:
        if level >= WARNING and text:
            LOGGED.append(text.decode(errors="replace"))

    callback = CALLBACK(keep)
    lib.llama_log_set(callback, None)
    for job in json.load(sys.stdin):
        try:
            result = answer(lib, job)
        except RuntimeError as error:
            result = {"error": str(error)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
