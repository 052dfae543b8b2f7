"""What several tests share: a builder of nsys-shaped files, and a slow computation to judge the fast one by."""
