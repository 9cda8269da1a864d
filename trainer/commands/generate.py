"""`trainer generate`: text from a run directory or a model directory."""

from pathlib import Path

from trainer.errors import BadInput


def main(directory: Path, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> int:
    """Print the prompt and its continuation; temperature 0 always takes the likeliest token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _model_directory(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, use_safetensors=True, local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers and safetensors raise many kinds for damaged files
        raise BadInput(f"{path}: the model cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    ids = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt").input_ids
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest:
        if ids.shape[1] >= longest:
            raise BadInput(f"the prompt has {ids.shape[1]} tokens, the model {longest} positions; shorten it")
        max_new_tokens = min(max_new_tokens, longest - ids.shape[1])
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k}
        if temperature
        else {"do_sample": False}
    )
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    return 0


def _model_directory(directory: Path) -> Path:
    """A model's own directory, a run's model/, or a run's newest valid checkpoint."""
    if (directory / "config.json").exists():
        return directory
    if (directory / "model" / "config.json").exists():
        return directory / "model"
    if (directory / "checkpoints").is_dir():
        from trainer import checkpoint

        _, path, problems = checkpoint.newest(directory / "checkpoints")
        if path:
            return path
        raise BadInput("\n".join([f"{directory}: no valid checkpoint in it", *problems.values()]))
    kind = (
        "neither a model (config.json) nor a run (model/ or checkpoints/)"
        if directory.is_dir()
        else "no such directory"
    )
    raise BadInput(f"{directory}: {kind}")
