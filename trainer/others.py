"""What other trainers call a run's keys: HF, TRL, PEFT, Unsloth, Axolotl, LLaMA-Factory, torchtune, litgpt, DeepSpeed,
accelerate and Megatron.
"""

BATCH = "batch_size, which counts over all ranks, and micro_batch_size, what one of them computes at once"
DATASET = "dataset"
LENGTH = "sequence_length"
STEPS_BETWEEN = "checkpoint_every, in steps"
DTYPE = "dtype: bfloat16, float16 or float32"
FOUR = "quantize: 4bit, with adapter: lora"
SHARDED = "strategy: zero1, zero2, fsdp, offload or infinity, without a file of its own"
MODEL_PARALLEL = "strategy: fsdp, by which each rank holds a part of the model"
INVENTORY = "nothing to set: the inventory has the hosts, and -l leaves some out"
PROCESSES = "nproc_per_node, in the inventory, where it is not to be one a GPU"
TEMPLATE = "nothing to set: a chat goes by the model's own template"
ANSWERS = "loss_on: answers, or all"
LOGGED = "nothing to set: metrics.jsonl has every step"
PREFERENCES = (
    "nothing of the kind: it learns from texts, instructions and chats, not from preferences or rewards"
)
EXPORTED = "nothing of the kind: `trainer export` makes what other tools load"
REVISION = "model, as the directory that `hf download NAME --revision REVISION --local-dir DIR` makes"
WANDB = "report_to: wandb, of runs by hand, with WANDB_PROJECT in the environment; `trainer send` gives it a cluster's"
TOKEN = "trainer_hub_token, in the inventory and best in a vault; by hand HF_TOKEN in the environment"
NOT_HERE = "nothing of the kind"
WORKERS = "nothing to set: data is tokenised once and mapped"
SCHEDULE = "lr_schedule: cosine, linear or constant"
TOKENIZER = "nothing to set: the model's own tokenizer is taken"
MADE = "nothing to set: the model's config.json says how it is made"
NF4 = "quantize: 4bit, which is NF4, its scales quantised, too"
PRECISION = "nothing to set: dtype says it"
STARTED = "nothing to set: train.yml trains, and evaluates where something is held out"
MEMBERS = "nothing to set: the hosts agree on who takes part, by the inventory"
ORDER = "nothing to set: each epoch has an order of its own, by seed"
MERGED = "model, with the adapter merged into it first (trainer export --merge)"
WHOLE = "nothing to set: a checkpoint has all that a run goes on from, and runs/NAME/model the model alone"
PART = "dataset, as org/name@revision:PATTERN"
PACKING = "packing, which is on"
CHUNKED = "nothing to set: the logits of a chunk alone are there (loss_chunk)"
RECOMPUTED = "gradient_checkpointing"

# Each says what to write instead, after "here it is", or "here there is" where that is nothing.
KEYS = {
    "learning_rate": "lr",
    "base_learning_rate": "lr",
    "lr_scheduler": "lr_schedule: cosine, linear or constant",
    "lr_scheduler_type": "lr_schedule: cosine, linear or constant",
    "scheduler": "lr_schedule: cosine, linear or constant",
    "warmup_ratio": "warmup_steps, in steps",
    "num_warmup_steps": "warmup_steps",
    "train_batch_size": BATCH,
    "global_batch_size": BATCH,
    "per_device_train_batch_size": BATCH,
    "per_device_batch_size": BATCH,
    "micro_batch": "micro_batch_size",
    "gradient_accumulation": BATCH,
    "gradient_accumulation_steps": BATCH,
    "accumulate_grad_batches": BATCH,
    "per_device_eval_batch_size": "micro_batch_size",
    "eval_batch_size": "micro_batch_size",
    "eval_accumulation_steps": "nothing to set: an evaluation keeps no outputs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_steps": "steps",
    "max_train_steps": "steps",
    "max_steps_per_epoch": "steps",
    "max_length": LENGTH,
    "max_seq_len": LENGTH,
    "max_seq_length": LENGTH,
    "seq_len": LENGTH,
    "seq_length": LENGTH,
    "sequence_len": LENGTH,
    "cutoff_len": LENGTH,
    "block_size": LENGTH,
    "context_length": LENGTH,
    "model_max_length": LENGTH,
    "bf16": DTYPE,
    "fp16": DTYPE,
    "fp32": DTYPE,
    "precision": DTYPE,
    "mixed_precision": DTYPE,
    "torch_dtype": DTYPE,
    "save_steps": STEPS_BETWEEN,
    "save_every": STEPS_BETWEEN,
    "save_every_n_steps": STEPS_BETWEEN,
    "save_interval": STEPS_BETWEEN,
    "save_strategy": "checkpoint_every, in steps, or checkpoint_epochs: true, or checkpoint_minutes",
    "save_total_limit": "checkpoint_keep",
    "eval_steps": "eval_every",
    "eval_interval": "eval_every",
    "eval_strategy": "eval_every, in steps, or 0 for the end of every epoch",
    "evaluation_strategy": "eval_every, in steps, or 0 for the end of every epoch",
    "early_stopping_patience": "patience",
    "logging_steps": LOGGED,
    "logging_first_step": LOGGED,
    "log_every_n_steps": LOGGED,
    "logging_dir": LOGGED,
    "output_dir": "run, after which runs/NAME is called, where all comes to",
    "run_name": "run",
    "experiment_name": "run",
    "base_model": "model",
    "model_id": "model",
    "model_name": "model",
    "model_path": "model",
    "model_name_or_path": "model",
    "pretrained_model_name_or_path": "model",
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_type", "tokenizer_config"), TOKENIZER),
    **dict.fromkeys(("special_tokens", "eos_token", "pad_token", "vocab_file", "merge_file"), TOKENIZER),
    "max_grad_norm": "grad_clip",
    "clip_grad": "grad_clip",
    "clip_grad_norm": "grad_clip",
    "gradient_clipping": "grad_clip",
    "gradient_clip_val": "grad_clip",
    "optim": "optimizer",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "lora_target": "lora_targets",
    "lora_target_linear": "lora_targets: all-linear",
    "lora_target_modules": "lora_targets",
    "target_modules": "lora_targets",
    "use_peft": "adapter: lora",
    "use_lora": "adapter: lora",
    "peft_type": "adapter: lora",
    "finetuning_type": "adapter: lora, or none for all weights",
    "load_in_4bit": FOUR,
    "use_4bit": FOUR,
    "qlora": FOUR,
    "use_qlora": FOUR,
    "quantization": "quantize: 4bit or 8bit, with adapter: lora",
    "quantization_bit": "quantize: 4bit or 8bit, with adapter: lora",
    "load_in_8bit": "quantize: 8bit, with adapter: lora",
    "train_on_input": ANSWERS,
    "train_on_inputs": ANSWERS,
    "train_on_prompt": ANSWERS,
    "mask_prompt": ANSWERS,
    "assistant_only_loss": ANSWERS,
    "completion_only_loss": ANSWERS,
    "val_size": "validation_split",
    "val_set_size": "validation_split",
    "validation_size": "validation_split",
    "test_size": "validation_split",
    "eval_dataset": "validation",
    "eval_file": "validation",
    "validation_file": "validation",
    "val_dataset": "validation",
    "data_path": DATASET,
    "datasets": "dataset, several by commas",
    "dataset_dir": DATASET,
    "dataset_name": DATASET,
    "dataset_path": DATASET,
    "train_dataset": DATASET,
    "train_file": DATASET,
    "dataset_text_field": "text_field",
    "max_train_samples": "max_samples",
    "sample_packing": "packing, which is on",
    "pad_to_sequence_len": "packing, which leaves no padding",
    "group_by_length": "packing, which leaves no padding",
    "attn_implementation": "attention",
    "flash_attn": "attention: auto or flash_attention_2",
    "flash_attention": "attention: auto or flash_attention_2",
    "use_flash_attention_2": "attention: auto or flash_attention_2",
    "sdp_attention": "attention: sdpa",
    "xformers_attention": "attention",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "torch_compile": "compile",
    "use_liger_kernel": "loss_kernel: liger",
    "deepspeed": SHARDED,
    "deepspeed_config": SHARDED,
    "fsdp": "strategy: fsdp",
    "fsdp_config": "strategy: fsdp",
    "zero_stage": SHARDED,
    "zero_optimization": SHARDED,
    "cpu_offload": "strategy: offload",
    "tp_size": MODEL_PARALLEL,
    "tensor_parallel": MODEL_PARALLEL,
    "tensor_parallel_size": MODEL_PARALLEL,
    "pipeline_parallel_size": "strategy: split, by which a host's GPUs have a part of the layers each",
    "n_gpus": PROCESSES,
    "num_gpus": PROCESSES,
    "num_processes": PROCESSES,
    "nproc_per_node": PROCESSES,
    "nnodes": INVENTORY,
    "num_nodes": INVENTORY,
    "num_machines": INVENTORY,
    "resume_from_checkpoint": "nothing to set: a run of the same name goes on from its newest checkpoint",
    "auto_resume_from_checkpoints": "nothing to set: a run of the same name goes on from its newest checkpoint",
    "ddp_timeout": "timeout_seconds",
    "random_seed": "seed",
    "data_seed": "seed",
    "use_wandb": WANDB,
    "wandb_project": WANDB,
    "num_workers": WORKERS,
    "dataloader_num_workers": WORKERS,
    "preprocessing_num_workers": WORKERS,
    "dataset_num_proc": WORKERS,
    "template": TEMPLATE,
    "chat_template": TEMPLATE,
    "prompt_template": TEMPLATE,
    "stage": "nothing to set: what a record is says how it is learnt (data_format)",
    "push_to_hub": EXPORTED,
    "hub_model_id": EXPORTED,
    "revision": REVISION,
    "model_revision": REVISION,
    "dataset_revision": PART,
    "hf_token": TOKEN,
    "hub_token": TOKEN,
    "use_dora": NOT_HERE,
    "use_rslora": NOT_HERE,
    "neftune_noise_alpha": NOT_HERE,
    "use_dpo": PREFERENCES,
    "dpo_beta": PREFERENCES,
    "reward_model": PREFERENCES,
    "rl": PREFERENCES,
    **dict.fromkeys(("beta", "max_prompt_length", "pref_beta", "pref_loss"), PREFERENCES),
    **dict.fromkeys(
        ("model_type", "hidden_size", "num_layers", "num_hidden_layers", "n_layer", "n_head"), MADE
    ),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings", "rope_scaling", "n_embd"), MADE),
    **dict.fromkeys(
        ("min_lr", "lr_decay_style", "cosine_min_lr_ratio", "lr_scheduler_kwargs", "decay_lr"), SCHEDULE
    ),
    **dict.fromkeys(("lr_decay_iters", "train_iters", "max_iters", "max_tokens"), "steps"),
    **dict.fromkeys(("warmup_iters", "lr_warmup_iters", "lr_warmup_steps", "warmup"), "warmup_steps"),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "optim_args"), "nothing to set: AdamW's epsilon is 1e-8"),
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "auto_find_batch_size"), "micro_batch_size"),
    **dict.fromkeys(("local_batch_size", "batch_size_per_device"), BATCH),
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_use_double_quant"), NF4),
    **dict.fromkeys(("double_quantization", "quantization_method", "bnb_config"), NF4),
    "bnb_4bit_compute_dtype": DTYPE,
    **dict.fromkeys(
        ("tf32", "pure_bf16", "downcast_bf16", "half_precision_backend", "fp16_opt_level"), PRECISION
    ),
    **dict.fromkeys(("use_cpu", "no_cuda"), "device: cpu"),
    **dict.fromkeys(("train_type", "tuner_type"), "adapter: lora, or none for all weights"),
    "full_finetuning": "adapter: none",
    **dict.fromkeys(
        ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head"), "lora_targets"
    ),
    **dict.fromkeys(("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"), "lora_targets"),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), MERGED),
    **dict.fromkeys(
        ("task_type", "lora_task_type", "fan_in_fan_out", "lora_fan_in_fan_out"), "nothing to set"
    ),
    **dict.fromkeys(
        ("bias", "lora_bias", "loftq_config", "modules_to_save", "lora_modules_to_save"), NOT_HERE
    ),
    **dict.fromkeys(
        ("init_lora_weights", "rank_pattern", "layers_to_transform", "unfrozen_parameters"), NOT_HERE
    ),
    **dict.fromkeys(
        ("label_smoothing_factor", "label_smoothing", "mask_history", "freeze_vit", "system"), NOT_HERE
    ),
    **dict.fromkeys(("use_unsloth", "fast_inference", "gpu_memory_utilization", "load_in_16bit"), NOT_HERE),
    **dict.fromkeys(("enable_activation_offloading", "activation_offloading", "plugins"), NOT_HERE),
    **dict.fromkeys(
        ("sequence_parallel", "sequence_parallel_degree", "context_parallel_size", "cp_size"), NOT_HERE
    ),
    **dict.fromkeys(("enable_liger_kernel", "liger_fused_linear_cross_entropy"), "loss_kernel: liger"),
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm"), NOT_HERE),
    **dict.fromkeys(("cut_cross_entropy", "chunked_cross_entropy"), CHUNKED),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "recompute_activations", "disable_gradient_checkpointing"),
        RECOMPUTED,
    ),
    "dynamo_backend": "compile",
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_degree", "fsdp_version"), MODEL_PARALLEL),
    "pipeline_model_parallel_size": "strategy: split, by which a host's GPUs have a part of the layers each",
    **dict.fromkeys(
        ("distributed_type", "use_distributed_optimizer", "stage3_gather_16bit_weights_on_model_save"),
        SHARDED,
    ),
    **dict.fromkeys(("offload_optimizer", "offload_param", "offload_params"), "strategy: offload"),
    "nvme_path": "offload_dir, with strategy infinity",
    "fsdp_transformer_layer_cls_to_wrap": "strategy: fsdp",
    **dict.fromkeys(("local_rank", "world_size", "machine_rank", "node_rank", "rdzv_backend"), MEMBERS),
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "master_addr", "master_port", "same_network"), MEMBERS
    ),
    **dict.fromkeys(("compute_environment", "ddp_backend", "main_training_function", "gpu_ids"), MEMBERS),
    "devices": PROCESSES,
    **dict.fromkeys(("ddp_bucket_cap_mb", "bucket_cap_mb"), "bucket_mb"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "communication_data_type", "enable_cpu_affinity"), "nothing to set"
    ),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "prediction_loss_only"), STARTED),
    **dict.fromkeys(("eval_iters", "eval_max_new_tokens", "eval_table_size"), STARTED),
    "evals_per_epoch": "eval_every, in steps, or 0 for the end of every epoch",
    "saves_per_epoch": "checkpoint_every, in steps, or checkpoint_epochs: true, or checkpoint_minutes",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), "patience"),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"), "spike_factor"),
    **dict.fromkeys(
        ("save_only_model", "save_safetensors", "save_on_each_node", "always_save_checkpoint"), WHOLE
    ),
    **dict.fromkeys(("save_adapter_weights_only", "ignore_data_skip"), WHOLE),
    **dict.fromkeys(
        ("out_dir", "overwrite_output_dir", "save", "log_dir", "dump_folder"), "run, a name for each run"
    ),
    **dict.fromkeys(("export_dir", "hub_strategy", "merge_lora"), EXPORTED),
    **dict.fromkeys(
        ("logging_strategy", "log_level", "log_interval", "steps_per_print", "disable_tqdm"), LOGGED
    ),
    **dict.fromkeys(("log_peak_memory_stats", "wall_clock_breakdown", "plot_loss", "metric_logger"), LOGGED),
    **dict.fromkeys(("include_tokens_per_second", "logger_name"), LOGGED),
    "use_tensorboard": "tensorboard",
    **dict.fromkeys(
        ("wandb_entity", "wandb_name", "wandb_watch", "wandb_log_model", "wandb_log", "wandb_run_id"), WANDB
    ),
    "token": TOKEN,
    **dict.fromkeys(("init_from", "checkpoint_dir", "base_model_name_or_path", "restore_from_path"), "model"),
    "train_file_path": DATASET,
    **dict.fromkeys(("dataset_mixer", "dataset_splits"), DATASET),
    **dict.fromkeys(("dataset_config", "dataset_config_name", "dataset_split", "dataset_train_split"), PART),
    "dataset_test_split": "validation",
    **dict.fromkeys(("split_dataset_ratio", "split"), "validation_split"),
    **dict.fromkeys(("interleave_probs", "mix_strategy"), "dataset_weights"),
    **dict.fromkeys(("shuffle", "shuffle_merged_datasets", "data_shuffle"), ORDER),
    **dict.fromkeys(
        ("streaming", "overwrite_cache", "dataset_prepared_path", "dataset_keep_in_memory"), WORKERS
    ),
    **dict.fromkeys(
        ("dataloader_pin_memory", "dataloader_drop_last", "dataset_processes", "dataset_kwargs"), WORKERS
    ),
    **dict.fromkeys(("remove_unused_columns", "label_names"), WORKERS),
    **dict.fromkeys(
        ("packing_strategy", "neat_packing", "padding_free", "eval_sample_packing", "packed"), PACKING
    ),
    **dict.fromkeys(("random_state", "full_determinism", "manual_seed"), "seed"),
}

# What they call a value, by our key.
VALUES = {
    "dtype": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        **dict.fromkeys(("bf16-true", "bf16-mixed"), "bfloat16"),
        **dict.fromkeys(("16-true", "16-mixed", "16", "fp16-mixed"), "float16"),
        **dict.fromkeys(("32-true", "32"), "float32"),
    },
    "device": {"gpu": "cuda", "cuda:0": "cuda"},
    "optimizer": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fused_adamw"), "adamw"),
        **dict.fromkeys(("adam_8bit", "adamw_bnb_8bit", "adamw8bit", "adamw_torch_8bit"), "adamw_8bit"),
        "paged_adamw_32bit": "paged_adamw",
    },
    "quantize": {
        **dict.fromkeys(("4", "4-bit", "nf4", "fp4", "int4", "bnb.nf4", "bnb.nf4-dq", "bnb.fp4"), "4bit"),
        **dict.fromkeys(("8", "8-bit", "int8", "bnb.int8"), "8bit"),
    },
    "adapter": {"qlora": "lora", "full": "none"},
    "attention": dict.fromkeys(("flash", "flash_attn", "flash_attention", "fa2"), "flash_attention_2"),
    "lr_schedule": {
        **dict.fromkeys(("cosine_with_min_lr", "cosine_with_warmup", "cosine_with_restarts"), "cosine"),
        **dict.fromkeys(("linear_with_warmup", "polynomial"), "linear"),
        "constant_with_warmup": "constant",
    },
    "loss_on": dict.fromkeys(("answer", "assistant", "completion", "completions", "response"), "answers"),
    "data_format": {
        **dict.fromkeys(("alpaca", "dolly", "prompt_completion"), "instruction"),
        **dict.fromkeys(("sharegpt", "messages", "chatml", "openai", "conversations"), "chat"),
        **dict.fromkeys(("plain", "completion", "pretrain"), "text"),
    },
    "strategy": {
        **dict.fromkeys(("dp", "none", "auto"), "ddp"),
        **dict.fromkeys(("fsdp1", "fsdp2", "full_shard", "deepspeed_zero3", "stage3"), "fsdp"),
        **dict.fromkeys(("deepspeed_zero2", "stage2", "shard_grad_op"), "zero2"),
        **dict.fromkeys(("zero", "deepspeed", "deepspeed_zero1", "stage1"), "zero1"),
        **dict.fromkeys(("cpu_offload", "zero_offload"), "offload"),
        **dict.fromkeys(("nvme", "zero_infinity"), "infinity"),
        "model_parallel": "split",
    },
}


def here(name: str) -> str:
    """What to write instead of another trainer's key, as a sentence's end; "" for one that is not known."""
    found = KEYS.get(name.rpartition(".")[2].lstrip("-").replace("-", "_").lower(), "")
    return f"here {'there' if found.startswith('nothing') else 'it'} is {found}" if found else ""
