"""Attribution of GPU time to layers, and the analyses built on it. Inputs and outputs are tables."""
