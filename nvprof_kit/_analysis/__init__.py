"""Attribution of GPU time to layers, and the analyses built on it: tables in, tables out."""
