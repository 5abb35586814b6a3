"""The quality of answers: closeness to full attention, calibration, tasks, evaluation."""
