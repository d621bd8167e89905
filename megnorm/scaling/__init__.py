"""From a ladder of sizes to a fitted law: sweeps of runs, fits of their losses, reports. Imports no torch."""
