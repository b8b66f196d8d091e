"""Keys by which the ledger recognises a machine, a model and a recipe: hashes of the facts that
decide memory and speed. Pure."""

from launch.base import files
from launch.schema.machine import GIB, Machine
from launch.schema.plan import ModelSize
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import affected_by, leaves

# keys of a config that name its origin, not the model
ORIGIN = {"_name_or_path", "transformers_version"}


def machine_key(machine: Machine) -> str:
    """Cards in their order, driver, host RAM a job may have, CPUs: not the name, not what is free
    just now.

    Sizes count in GiB: a kernel or a driver keeps some MiB for itself.
    """
    cards = [
        [
            gpu.vendor,
            gpu.name,
            gpu.architecture,
            round(gpu.total_bytes / GIB),
            gpu.driver.partition(".")[0],
        ]
        for gpu in machine.gpus
    ]
    facts = [cards, round(machine.host_limit_bytes / GIB), machine.cpu_count]
    return f"machine-{files.digest(facts)[:16]}"


def model_key(model: ModelSize) -> str:
    """Config and number of parameters: the same model under another name or in another folder is
    the same."""
    config = {key: value for key, value in model.config.items() if key not in ORIGIN}
    return f"model-{files.digest([config, model.parameters])[:16]}"


def recipe_key(recipe: Recipe) -> str:
    """The settings that decide memory and seconds of an optimizer step, and those that planning may
    choose from; of the batch only its effective size."""
    deciding = {
        key: value
        for key, value in leaves(recipe.model_dump(mode="json")).items()
        if affected_by(key) & {"memory", "step_time", "plan"}
    }
    return f"recipe-{files.digest([deciding, recipe.training.samples_per_process])[:16]}"
