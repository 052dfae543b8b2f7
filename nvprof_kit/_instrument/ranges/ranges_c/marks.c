/* Hooks before the autograd nodes at which the backward pass enters a call. */
#include "ranges.h"

static const uint64_t ACCUMULATE_GRAD = UINT64_MAX;

/* The section of the call in which a node was created: the number of edges up to it. */
static Py_ssize_t section_of(const Frame *self, uint64_t number) {
    Py_ssize_t low = 0, high = self->count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (number < self->edges[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static int number_of(PyObject *node, uint64_t *number) {
    PyObject *result = PyObject_CallMethodNoArgs(node, names.sequence_nr);
    if (result == NULL) {
        return -1;
    }
    *number = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return *number == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* Whether a node created an argument of the thread's outermost call; see frames_python.py. */
static int is_among(PyObject *given, PyObject *node) {
    PyObject *key = given == NULL ? NULL : PyLong_FromVoidPtr(node);
    if (key == NULL) {
        return given == NULL ? 0 : -1;
    }
    Py_INCREF(given);
    int found = PyDict_Contains(given, key);
    Py_DECREF(given);
    Py_DECREF(key);
    return found;
}

static int is_given(const Frame *self, PyObject *node) { return is_among(self->given, node); }

int has_made_any(PyObject *nodes, uint64_t begin, PyObject *given) {
    int made = 0;
    for (Py_ssize_t index = 0; made == 0 && index < PyList_GET_SIZE(nodes); index++) {
        uint64_t number;
        PyObject *node = Py_NewRef(PyList_GET_ITEM(nodes, index));
        made = number_of(node, &number);
        if (made == 0 && number >= begin) {
            int other = is_among(given, node);
            made = other < 0 ? -1 : !other;
        }
        Py_DECREF(node);
    }
    return made;
}

/* Nodes by identity, because a Python node class may define equality; referenced, so that identities stay unique. */
PyObject *by_identity(PyObject *nodes) {
    PyObject *found = PyDict_New();
    for (Py_ssize_t index = 0; found != NULL && index < PyList_GET_SIZE(nodes); index++) {
        PyObject *node = Py_NewRef(PyList_GET_ITEM(nodes, index)), *key = PyLong_FromVoidPtr(node);
        if (key == NULL || PyDict_SetItem(found, key, node) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(key);
        Py_DECREF(node);
    }
    return found;
}

static int mark_node(Frame *self, PyObject *node) {
    PyObject *reach = reach_of(self);
    if (reach == NULL) {
        return -1;
    }
    int done = drop_result(PyObject_CallMethodOneArg(node, names.register_prehook, reach));
    Py_DECREF(reach);
    return done;
}

/* Add a number to a set, which may be NULL; returns 1 if it was new. */
static int is_new(PyObject **set, uint64_t number) {
    PyObject *key = PyLong_FromUnsignedLongLong(number), *made = *set == NULL ? PySet_New(NULL) : NULL;
    if (key == NULL || (*set == NULL && made == NULL)) {
        Py_XDECREF(key);
        Py_XDECREF(made);
        return -1;
    }
    if (*set == NULL) { /* a garbage collection triggered by the allocation may have created it */
        *set = made;
    } else {
        Py_XDECREF(made);
    }
    PyObject *held = Py_NewRef(*set);
    int known = PySet_Contains(held, key);
    int done = known == 0 ? PySet_Add(held, key) : known;
    Py_DECREF(held);
    Py_DECREF(key);
    return done < 0 ? -1 : !known;
}

typedef struct {
    PyObject *node;
    Py_ssize_t origin;
} Pending;

typedef struct {
    Pending *items;
    Py_ssize_t count, room;
} Search;

static int add_pending(Search *search, PyObject *node, Py_ssize_t origin) {
    if (search->count == search->room) {
        Py_ssize_t room = search->room == 0 ? 32 : 2 * search->room;
        Pending *items = PyMem_Realloc(search->items, (size_t)room * sizeof(Pending));
        if (items == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        search->items = items;
        search->room = room;
    }
    search->items[search->count++] = (Pending){Py_NewRef(node), origin};
    return 0;
}

static int add_makers(Search *search, PyObject *node, Py_ssize_t origin) {
    PyObject *makers = PyObject_GetAttr(node, names.next_functions);
    if (makers == NULL || !PyTuple_Check(makers)) {
        Py_XDECREF(makers);
        return makers == NULL ? -1 : 0;
    }
    int done = 0;
    for (Py_ssize_t index = 0; done == 0 && index < PyTuple_GET_SIZE(makers); index++) {
        PyObject *maker = PyTuple_GET_ITEM(makers, index);
        maker = PyTuple_Check(maker) && PyTuple_GET_SIZE(maker) == 2 ? PyTuple_GET_ITEM(maker, 0) : Py_None;
        done = maker == Py_None ? 0 : add_pending(search, maker, origin);
    }
    Py_DECREF(makers);
    return done;
}

static int search_node(Frame *self, Search *search, PyObject *node, Py_ssize_t origin) {
    uint64_t number;
    int fresh;
    if (number_of(node, &number) < 0) {
        return -1;
    }
    Py_ssize_t section = section_of(self, number);
    if (!(section & 1) || number == ACCUMULATE_GRAD) {
        return 0;
    }
    int given = is_given(self, node);
    if (given != 0) {
        return given < 0 ? -1 : 0;
    }
    if (section != origin && ((fresh = is_new(&self->marked, number)) < 0 || (fresh && mark_node(self, node) < 0))) {
        return -1;
    }
    if (section == 1) { /* no section follows the first one */
        return 0;
    }
    fresh = is_new(&self->seen, number);
    return fresh <= 0 ? fresh : add_makers(search, node, section);
}

static int search_from(Frame *self, PyObject *node) {
    Search search = {NULL, 0, 0};
    int done = add_pending(&search, node, 0);
    while (search.count > 0) {
        Pending next = search.items[--search.count];
        if (done == 0) {
            done = search_node(self, &search, next.node, next.origin);
        }
        Py_DECREF(next.node);
    }
    PyMem_Free(search.items);
    return done;
}

/* Whether a node's tensor left an outermost call; with `leaves`, record that it has. */
int has_left(PyObject *node, bool leaves) {
    PyObject *metadata = PyObject_GetAttr(node, names.metadata);
    if (metadata == NULL) {
        return -1;
    }
    int done = leaves ? PyObject_SetItem(metadata, names.left, Py_True) : PySequence_Contains(metadata, names.left);
    Py_DECREF(metadata);
    return done;
}

static int mark_one(Frame *self, PyObject *node, bool ends) {
    uint64_t number;
    if (number_of(node, &number) < 0) {
        return -1;
    }
    if (!(section_of(self, number) & 1)) {
        return 0;
    }
    int other = self == outside ? has_left(node, false) : is_given(self, node);
    if (other != 0) {
        return other < 0 ? -1 : 0;
    }
    bool direct = self == outside || (ends && self->count == 1);
    return direct ? mark_node(self, node) : search_from(self, node);
}

/* Mark where the backward pass, arriving at these nodes, enters the call's own nodes. */
int mark(Frame *self, PyObject *nodes, bool ends) {
    int done = 0;
    for (Py_ssize_t index = 0; done == 0 && nodes != NULL && index < PyList_GET_SIZE(nodes); index++) {
        PyObject *node = Py_NewRef(PyList_GET_ITEM(nodes, index));
        done = mark_one(self, node, ends);
        Py_DECREF(node);
    }
    return done;
}
