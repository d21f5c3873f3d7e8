"""Two patches of Quire. This file only declares them: it imports nothing that they change."""

import datetime

from quire.patch import Patch, Target

PATCHES = [
    Patch(
        id="example-small-steps",
        targets=(
            Target(
                path="quire.platforms.cpu:CpuPlatform.capabilities",
                kind="wrap",
                by="quire_example_patches.changes:with_small_steps",
                signature="f4ca892d9e9f",
            ),
        ),
        processes=("frontend", "core", "worker", "inspector"),
        versions=">=0.1,<0.3",
        owner="the maintainers of this example",
        why="The memory of a made-up device holds the activations of 1,024 tokens.",
        how="Wraps the platform's capabilities, and lowers the default size of a step.",
        related_change="none: a real device has a platform of its own, whose capabilities say so",
        removal_plan="Remove it when the device has its own platform.",
        removal_check="quire_example_patches.checks:has_own_platform",
        expires=datetime.date(2027, 12, 31),
        on_platform="quire_example_patches.checks:is_here",
    ),
    Patch(
        id="example-step-count",
        targets=(
            Target(
                path="quire.worker.worker:Worker.execute",
                kind="wrap",
                by="quire_example_patches.changes:count_step",
                signature="f243c85b3053",
            ),
            Target(
                path="quire.worker.worker:Worker.example_step_count",
                kind="add",
                by="quire_example_patches.changes:step_count",
            ),
        ),
        processes=("worker",),
        versions=">=0.1,<0.3",
        owner="the maintainers of this example",
        why="A worker does not tell how many steps it has computed.",
        how="Counts the calls of `execute`, and adds a method that tells the number.",
        related_change="none: this is an example",
        removal_plan="Remove it when a worker has a method `num_steps`.",
        removal_check="quire_example_patches.checks:worker_counts_itself",
        expires=datetime.date(2027, 12, 31),
    ),
]
