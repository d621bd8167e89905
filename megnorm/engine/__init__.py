"""DeepSpeed: configuration, initialisation, optimizer groups, one optimizer step."""
