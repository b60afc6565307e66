"""Language models on one device: plain torch, no rank, mesh or group in sight."""
