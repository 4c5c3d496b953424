"""Batch scripts and manifests, made from the options of ``train``. Pure."""
