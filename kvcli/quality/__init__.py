"""How good the answers are: closeness to full attention, calibration, tasks, evaluation."""
