"""The artifact store on disk: content-addressed, verified on read, safe between processes."""
