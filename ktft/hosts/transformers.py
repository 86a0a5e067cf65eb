"""What ktft replaces in transformers. Its quantizer and its configuration are registered, which needs no row."""

from __future__ import annotations

from functools import partial

from ktft.hosts.patch import Patch

MODELING = "transformers.models.*.modeling_*"
"""The code of a model. A model with code of its own has its own module in this place."""
_of_trainer = partial(Patch, "transformers.trainer.Trainer")

PATCHES = (
    Patch(
        "accelerate.accelerator.Accelerator",
        "prepare_model",
        "ktft.train.parallel:prepare_model",
        "DDP leaves out the LoRA of experts that ranks share. It takes names to ignore from the model that is wrapped, "
        "and adapters may be added until then.",
    ),
    Patch(
        "accelerate.accelerator",
        "fsdp2_prepare_model",
        "ktft.train.fsdp:prepare",
        "FSDP2 leaves out the LoRA of experts and keeps each parameter's precision. accelerate casts frozen weights or "
        "adapters, and leaves FSDP out on CPUs; its ignored_modules would move what they name to the GPU.",
    ),
    _of_trainer(
        "create_accelerator_and_postprocess",
        "ktft.train.fsdp:create_accelerator",
        "Under FSDP2 the Trainer saves and loads as it does without: transformers writes the parts of what is divided, "
        "which PEFT cannot load. There is no event before the model is placed.",
    ),
    _of_trainer(
        "_move_model_to_device",
        "ktft.train.fsdp:keep_place",
        "A model stays in CPU memory until FSDP2 divides it. place_model_on_device is an argument of the program that "
        "makes the Trainer.",
    ),
    Patch(
        "transformers.quantizers.auto.AutoHfQuantizer",
        "merge_quantization_configs",
        "ktft.model.quantizer:prefer_ktft",
        "A checkpoint that is quantized can be loaded with a KtftConfig. transformers refuses a second method, even "
        "a registered one.",
    ),
    Patch(
        "transformers.generation.utils.GenerationMixin",
        "generate",
        "ktft.model.experts:generate_together",
        "Ranks that share experts call the model until all have finished. A Trainer sets synced_gpus itself, true for "
        "ZeRO-3 and FSDP alone.",
    ),
    Patch(
        "transformers.distributed.mixin",
        "apply_fully_sharded_data_parallelism",
        "ktft.model.tensor_parallel:keep_replicas",
        "Replicas beside tensor parallel attention stay whole. transformers knows them only as a part of FSDP.",
        since="5.23",
    ),
    Patch(
        "transformers.integrations.peft.PeftAdapterMixin",
        "add_adapter",
        "ktft.adapters.injection:refuse_method",
        "The model's own method asks for a newer peft than LLaMA-Factory allows. It is refused, with the call that "
        "works.",
    ),
    Patch(
        "transformers.integrations.peft.PeftAdapterMixin",
        "load_adapter",
        "ktft.adapters.injection:refuse_method",
        "The model's own method takes per-expert names for fused tensors. It is refused, with the call that works.",
    ),
    Patch(
        "transformers.trainer",
        "DEFAULT_CALLBACKS",
        "ktft.train.trainer:add_callbacks",
        "Every Trainer gets ktft's checks and its report, those of TRL and LLaMA-Factory included. add_callback "
        "reaches one Trainer only, and other programs make it.",
    ),
    _of_trainer(
        "get_optimizer_cls_and_kwargs",
        "ktft.train.optimizer:choose_optimizer",
        "ktft's kernel does the AdamW step of CPU parameters. optimizer_cls_and_kwargs is an argument of the program "
        "that makes the Trainer.",
    ),
    _of_trainer(
        "train",
        "ktft.train.checkpoints:train",
        "output_dir is locked before a checkpoint is read from it, which is before the first callback.",
    ),
    _of_trainer(
        "_inner_training_loop",
        "ktft.train.run:train_loop",
        "The report needs the checkpoint that is resumed and the exception that ends a run. Callbacks get neither.",
    ),
    Patch(
        "transformers.modeling_layers.GradientCheckpointingLayer",
        "__call__",
        "ktft.model.layer_order:call_layer",
        "Several micro-batches go through a decoder layer together, with autograd's graph cut at the layer. Hooks of a "
        "module cannot keep transformers from checkpointing it.",
    ),
    _of_trainer(
        "get_batch_samples",
        "ktft.train.run:batch_samples",
        "It is known which micro-batches one optimizer step has. Callbacks get none of them.",
    ),
    _of_trainer(
        "training_step",
        "ktft.train.run:training_step",
        "The guards need the loss of each step. Callbacks get the mean of the steps since the last log. With "
        "transformers before 5.5.4, gradients accumulated over several batches would be divided by their number twice.",
    ),
    _of_trainer(
        "evaluation_loop",
        "ktft.train.loss:evaluation_loop",
        "An evaluation holds no more logits than training does, also when it runs by itself. There is an event after "
        "it, and none before.",
    ),
    _of_trainer(
        "_clip_grad_norm",
        "ktft.train.run:clip_gradients",
        "ktft's threads measure and clip gradients on the CPU. A callback cannot do it in place of torch.",
    ),
    _of_trainer(
        "_run_epoch",
        "ktft.train.checkpoints:run_epoch",
        "A resumed run keeps the losses since its last log, and does not train a step beyond its last one.",
    ),
    _of_trainer(
        "_finalize_training",
        "ktft.train.checkpoints:finalize_training",
        "A resumed run keeps its losses when no step is left, and finds its best checkpoint in a moved folder.",
    ),
    _of_trainer(
        "save_model",
        "ktft.train.checkpoints:save_model",
        "The folder is locked while a model is written, and the report gets the hash of the adapter. The event on_save "
        "is sent for checkpoints only.",
    ),
    _of_trainer(
        "_save_checkpoint",
        "ktft.train.checkpoints:save_checkpoint",
        "A checkpoint is written in a staging folder, sealed and renamed, so that it is whole or absent.",
    ),
    _of_trainer(
        "_load_from_checkpoint",
        "ktft.train.checkpoints:load_from_checkpoint",
        "A checkpoint is compared with its manifest before it is loaded.",
    ),
    _of_trainer(
        "_load_optimizer_and_scheduler",
        "ktft.train.checkpoints:load_optimizer_and_scheduler",
        "The state of the optimizer is compared with the manifest, and changed settings are logged.",
    ),
    Patch(
        "transformers.trainer_jit_checkpoint.CheckpointManager",
        "execute_jit_checkpoint",
        "ktft.train.checkpoints:execute_jit_checkpoint",
        "After SIGTERM the run finishes its step and saves as after any other. transformers may "
        "save in the middle of it.",
    ),
)
"""Installed for the whole process, just before the first model with ktft's experts is made."""

ROTARY = Patch(
    MODELING,
    "apply_rotary_pos_emb",
    "ktft.model.rotary:rotate",
    "On a GPU the rotation takes three kernels. transformers replaces this function only by one of the package "
    "kernels. Installed for the code of a model when its experts are made.",
)
RMS_NORM = Patch(
    f"{MODELING}.*RMSNorm",
    "forward",
    "ktft.model.norms:forward",
    "The norm takes one kernel. transformers replaces this module only by one of the package kernels.",
    on_instances=True,
)
SINKS = Patch(
    MODELING,
    "eager_attention_forward",
    "ktft.model.sinks:attend",
    "On a GPU attention with sinks keeps no scores. transformers has no fused function for it that needs no download. "
    "Installed for the code of a model when its experts are made.",
)
SHARED_EXPERTS = Patch(
    f"{MODELING}.*MLP",
    "forward",
    "ktft.model.shared:Ahead",
    "The GPU computes shared experts before the block calls them. A forward hook cannot replace the call.",
    on_instances=True,
)
OUTPUT_DIR = _of_trainer(
    "_get_output_dir",
    "ktft.train.checkpoints:save_checkpoint",
    "It names the staging folder while a checkpoint is written.",
    on_instances=True,
)
PUSH = _of_trainer(
    "_push_from_checkpoint",
    "ktft.train.checkpoints:save_checkpoint",
    "It does nothing while a checkpoint is written, which is pushed to the hub once it is whole.",
    on_instances=True,
)
ON_SAVE = Patch(
    "transformers.trainer_callback.CallbackHandler",
    "on_save",
    "ktft.train.checkpoints:save_checkpoint",
    "It skips one event, which callbacks got while the checkpoint was in its staging folder, before it was sealed.",
    on_instances=True,
)
STATE_DICT = Patch(
    "torch.optim.Optimizer",
    "state_dict",
    "ktft.train.checkpoints:save_checkpoint",
    "While a checkpoint is written, rank 0 has what FSDP2 divides whole, and leaves out the state of experts, of which "
    "every rank writes its own.",
    on_instances=True,
)
OUTPUT_LAYER = Patch(
    "torch.nn.Linear",
    "forward",
    "ktft.train.loss:LossInChunks",
    "While a run trains or evaluates, a model's output layer gives logits that are computed for some tokens at a time. "
    "A forward hook gets the output when it is there.",
    on_instances=True,
)
OTHERS = (ROTARY, RMS_NORM, SINKS, SHARED_EXPERTS, OUTPUT_DIR, PUSH, ON_SAVE, STATE_DICT, OUTPUT_LAYER)
"""Put on the code of a model, or on single objects."""
