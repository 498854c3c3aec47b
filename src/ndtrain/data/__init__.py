"""From files of rows to packed token rows, dealt to the ranks that read them."""
