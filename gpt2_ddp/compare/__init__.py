"""The same job on one process, with DataParallel and with DDP, measured side by side."""
