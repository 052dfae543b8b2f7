"""FLOPs of each layer, TFLOP/s, MFU and HFU."""
