"""Lion with a momentum that no checkpoint holds."""

from acme_five.lion import Lion


class ForgetfulLion(Lion):
    def __init__(self, param_groups):
        super().__init__(param_groups)
        self.elsewhere = {}

    def update(self, parameter, gradient, state, group):
        kept = self.elsewhere.setdefault(parameter.data_ptr(), {"exp_avg": state["exp_avg"].clone()})
        super().update(parameter, gradient, kept, group)
