"""The paper: data, models, training and the command line. Built on the library, which never imports it."""
