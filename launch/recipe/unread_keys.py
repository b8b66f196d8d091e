"""Keys that nothing reads beside the recipe's other choices. The plan says so where a user has
written one."""

import re
from collections.abc import Callable, Iterator, Sequence

from launch.schema.recipe import Recipe
from launch.schema.training_section import TENSORBOARD

# optimizer -> the names that transformers 5.23 reads in optim_args; weight_decay has its own key
_OPTIM_ARGS = {
    "sgd": {"momentum", "dampening", "nesterov"},
    "adagrad": {"lr_decay", "eps"},
    "rmsprop": {"momentum", "alpha", "eps", "centered"},
}
# (keys, True if the recipe's other choices leave them unread, the reason)
ROWS: Sequence[tuple[tuple[str, ...], Callable[[Recipe], bool], str]] = (
    (
        (
            "data.max_validation_samples",
            "evaluation.exact_match_rows",
            "evaluation.sample_answers",
            "training.eval_delay",
            "training.eval_on_start",
            "training.eval_steps",
            "training.per_device_eval_batch_size",
        ),
        lambda recipe: not recipe.data.holds_out,
        "no rows are held out to evaluate on; name some with --data.validation_file=FILE, or hold"
        " some out with --data.validation_size=0.05",
    ),
    (
        ("training.warmup_steps",),
        lambda recipe: recipe.training.lr_scheduler_type == "constant",
        "lr_scheduler_type constant has no warmup; constant_with_warmup has one",
    ),
    (
        ("training.lr_scheduler_kwargs",),
        lambda recipe: recipe.training.lr_scheduler_type.startswith("constant"),
        "a constant learning rate takes no keywords; choose another lr_scheduler_type",
    ),
    (
        ("training.adam_beta1", "training.adam_beta2"),
        lambda recipe: not re.search("adam|lion", recipe.training.optim),
        "the optimizer has no betas; the adamw and lion ones have",
    ),
    (
        ("training.adam_epsilon",),
        lambda recipe: "adam" not in recipe.training.optim,
        "the optimizer does not take it; the adamw ones do",
    ),
    (
        ("training.optim_args",),
        lambda recipe: not _reads_optim_args(recipe),
        "the optimizer does not take all of these; "
        + ", ".join(
            f"{optim} takes {' '.join(sorted(_OPTIM_ARGS[optim]))}" for optim in _OPTIM_ARGS
        ),
    ),
    (
        ("training.liger_kernel_config",),
        lambda recipe: not recipe.training.use_liger_kernel,
        "training.use_liger_kernel is not true",
    ),
    (
        ("training.run_name",),
        lambda recipe: {*recipe.training.report_to} <= {TENSORBOARD},
        "TensorBoard names its figures after the run folder; training.report_to names trackers that"
        " take a name",
    ),
    (
        (
            "training.project",
            "training.trackio_bucket_id",
            "training.trackio_space_id",
            "training.trackio_static_space_id",
        ),
        lambda recipe: "trackio" not in recipe.training.report_to,
        "trackio alone takes it: --training.report_to=[trackio]",
    ),
    (
        ("training.dataloader_persistent_workers", "training.dataloader_prefetch_factor"),
        lambda recipe: recipe.training.dataloader_num_workers == 0,
        "training.dataloader_num_workers is 0",
    ),
    (
        ("tokenizer.loading",),
        lambda recipe: not (recipe.tokenizer.path or recipe.model.path),
        "the tokenizer is trained here, and not loaded from a folder",
    ),
    (
        ("launch.join_timeout_s", "launch.main_process_port"),
        lambda recipe: recipe.launch.nodes == 1,
        "it is for several machines; set launch.nodes too",
    ),
    (
        ("launch.vram_fraction", "launch.vram_limit_gib"),
        lambda recipe: recipe.launch.device == "cpu",
        "launch.mode is for a CPU, which has no VRAM",
    ),
)


def _reads_optim_args(recipe: Recipe) -> bool:
    options = str(recipe.training.extras.get("optim_args") or "").replace(" ", "").split(",")
    names = {option.partition("=")[0] for option in options}
    return recipe.training.optim.startswith("rmsprop_bnb") or names <= _OPTIM_ARGS.get(
        recipe.training.optim, set()
    )


def of_recipe(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield (section, key, reason) for each key that is not read beside the others' values."""
    for names, is_unread, reason in ROWS:
        if is_unread(recipe):
            for name in names:
                section, _, key = name.partition(".")
                yield section, key, reason
