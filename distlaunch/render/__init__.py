"""Write batch scripts and Kubernetes manifests from the options of ``train``. No I/O."""
