"""Keras (tf_keras) on the digits of scikit-learn under MultiWorkerMirroredStrategy; any number of workers, as one."""

from __future__ import annotations

import json
import os

import tensorflow as tf
from digits import load_digits

BATCH, EPOCHS = 96, 12  # of all workers together

task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
strategy = tf.distribute.MultiWorkerMirroredStrategy()
images, labels = load_digits()
images, labels = (images[:1728] / 16.0).astype("float32"), labels[:1728]
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
with strategy.scope():
    initial = tf.keras.initializers.GlorotUniform
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(32, activation="relu", kernel_initializer=initial(seed=1)),
        tf.keras.layers.Dense(10, kernel_initializer=initial(seed=2)),
    ])  # fmt: skip
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.5), loss=loss, metrics=["accuracy"])
history = model.fit(data.with_options(options), epochs=EPOCHS, verbose=0, shuffle=False).history
message = {"task": task, "replicas": strategy.num_replicas_in_sync, "keras": tf.keras.Model.__module__, **history}
print("trained", json.dumps(message), flush=True)
