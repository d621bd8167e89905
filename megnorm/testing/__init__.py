"""What tests and the parity command share: ranks in processes, tiny configurations, comparing layouts."""
