/* Saving errors, and queries about the calling thread. */
#include "ranges.h"

struct Answers answers;

SavedError save_error(void) {
    SavedError raised;
    PyErr_Fetch(&raised.kind, &raised.error, &raised.traceback);
    return raised;
}

void restore_error(SavedError raised) {
    if (raised.kind != NULL) {
        PyErr_Restore(raised.kind, raised.error, raised.traceback);
    }
}

int drop_result(PyObject *result) {
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

PyObject *call_held(PyObject *function) {
    Py_INCREF(function);
    PyObject *result = PyObject_CallNoArgs(function);
    Py_DECREF(function);
    return result;
}

PyObject *call_held_with(PyObject *function, PyObject *argument) {
    Py_INCREF(function);
    PyObject *result = PyObject_CallOneArg(function, argument);
    Py_DECREF(function);
    return result;
}

static int number_from(const Query *query, long long *answer) {
    PyObject *result = call_query(query);
    if (result == NULL) {
        return -1;
    }
    int too_large = 0;
    bool whole = PyLong_CheckExact(result); /* then -1 is an answer, the usual one, and never an error */
    *answer = PyLong_AsLongLongAndOverflow(result, &too_large);
    Py_DECREF(result);
    if (too_large != 0) {
        PyErr_SetString(PyExc_OverflowError, "PyTorch's number of an autograd node or pass exceeds 64 bits");
    }
    return too_large != 0 || (*answer == -1 && !whole && PyErr_Occurred()) ? -1 : 0;
}

int ask_task(long long *task) {
    return number_from(&answers.task, task);
}

int ask_sequence(uint64_t *sequence) {
    long long number = 0;
    int done = number_from(&answers.sequence, &number);
    *sequence = (uint64_t)number;
    return done;
}

int ask_grad(void) {
    if (answers.grad_mode != NULL) {
        return answers.grad_mode();
    }
    PyObject *result = call_query(&answers.grad);
    int truth = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    return truth;
}
