"""Layer render: batch scripts and manifests, made of the options of ``train`` and a few more; pure."""
