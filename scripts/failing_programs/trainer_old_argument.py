# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: evaluation_strategy
# expect-frame: build_arguments
# expect-hint: version | eval_strategy | renamed
# misleads: install it
"""A script written for an older transformers passes an argument that has another name now."""
import os
import time

from transformers import TrainingArguments


def build_arguments():
    return TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        learning_rate=2e-5,
        evaluation_strategy="steps",
        eval_steps=200,
        report_to=[],
        use_cpu=True,
    )


def main():
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    print("rank", os.environ["RANK"], "builds its arguments", flush=True)
    build_arguments()


main()
